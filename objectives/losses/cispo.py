"""Clipped importance weights instead of clipped gradients."""

from __future__ import annotations

from torch import Tensor

from objectives.losses.ratios import Threshold, clip_ratios, token_log_ratios


def cispo(
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    *,
    clip_low_threshold: Threshold = 0.0,
    clip_high_threshold: Threshold = 4.0,
) -> Tensor:
    """REINFORCE with a clipped importance weight, ``-sum(sg[clip(r, low, high)] A log p)``; 0-d.

    The weight is a constant (sg: no gradient), so every token keeps a gradient, of bounded size. The default
    bounds it from above only.

    Source: MiniMax 2025, "MiniMax-M1" (arXiv:2506.13585), equation 4; bounds as in the Tinker documentation.

    Args:
        logprobs_DT: nats, ``(N,)``, of the policy in training, p.
        sampling_logprobs_DT: the same tokens under the policy that sampled them, q.
        advantages_DT: ``(N,)``; 0 leaves a token out.
        clip_low_threshold: least weight, at least 0; a number, or ``(N,)``.
        clip_high_threshold: greatest weight; a number, or ``(N,)``.

    >>> import torch
    >>> cispo(torch.tensor([-1.0, -2.0]), torch.tensor([-4.0, -2.0]), torch.tensor([1.0, 1.0]))
    tensor(6.)
    """
    ratio_DT = token_log_ratios(logprobs_DT.detach(), sampling_logprobs_DT, advantages_DT).exp()
    weight_DT = clip_ratios(ratio_DT, clip_low_threshold, clip_high_threshold)
    return -(weight_DT * advantages_DT * logprobs_DT).sum()
