"""Proximal policy optimization: no more credit for a token that has moved far enough already."""

from __future__ import annotations

from torch import Tensor

from objectives.losses.ratios import Threshold, clip_objective, token_log_ratios


def ppo(
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    *,
    clip_low_threshold: Threshold = 0.8,
    clip_high_threshold: Threshold = 1.2,
) -> Tensor:
    """Clipped surrogate, ``-sum(min(r A, clip(r, low, high) A))`` with ``r = p / q`` per token; 0-d.

    A token has no gradient once its ratio has passed a bound in the direction that its advantage pushes.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv:1707.06347), equation 7;
    bounds as the Tinker documentation gives them.

    Args:
        logprobs_DT: nats, ``(N,)``, of the policy in training, p.
        sampling_logprobs_DT: the same tokens under the policy that sampled them, q.
        advantages_DT: ``(N,)``; 0 leaves a token out.
        clip_low_threshold: least ratio, at least 0; a number, or ``(N,)``.
        clip_high_threshold: greatest ratio; a number, or ``(N,)``.

    >>> import torch
    >>> ppo(torch.tensor([0.0, -2.0]), torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 1.0]))
    tensor(-2.2000)
    """
    ratio_DT = token_log_ratios(logprobs_DT, sampling_logprobs_DT, advantages_DT).exp()
    return -clip_objective(ratio_DT, advantages_DT, clip_low_threshold, clip_high_threshold).sum()
