"""Group sequence policy optimization: one importance ratio and one clip per sequence."""

from __future__ import annotations

from torch import Tensor

from objectives.losses.policy.ratios import Threshold, clip_objective, sequence_log_ratios


def gspo(  # noqa: PLR0913 - four values per token, the sequences, two bounds
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    ratio_mask_DT: Tensor,
    offsets_D: Tensor | None,
    *,
    clip_low_threshold: Threshold = 1 - 3e-4,
    clip_high_threshold: Threshold = 1 + 4e-4,
) -> Tensor:
    """GSPO-token, ``-sum_t min(s_t A_t, clip(s_t, low, high) A_t)``; 0-d.

    ``s_t = sg[s] p_t / sg[p_t]``, with ``sg`` for stop-gradient: each token has the value of its sequence's ratio s,
    the geometric mean of the token ratios, and the gradient of its own log-probability.

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization" (arXiv:2507.18071), equations 13 and 14, bounds
    of its section 5.1; summed over tokens as in the Tinker documentation instead of averaged over each sequence.

    Args:
        logprobs_DT: nats, ``(N,)``, under the policy in training, p.
        sampling_logprobs_DT: nats, ``(N,)``, under the policy that sampled the tokens, q.
        advantages_DT: ``(N,)``; a token with advantage 0 has no gradient but still counts in the ratio.
        ratio_mask_DT: ``(N,)``: non-zero for the sampled tokens, which make up the ratio.
        offsets_D: ``(D + 1,)``: sequence ``d`` is ``[offsets_D[d], offsets_D[d + 1])``; ``None`` for one sequence.
        clip_low_threshold: lower bound of the ratio, at least 0; a number, or ``(N,)``.
        clip_high_threshold: upper bound of the ratio; a number, or ``(N,)``.

    >>> import torch
    >>> lp, ones = torch.tensor([-1.0, -2.0, -3.0]), torch.ones(3)
    >>> gspo(lp, lp, ones, ones, torch.tensor([0, 2, 3]))
    tensor(-3.)
    """
    log_ratio_DT = sequence_log_ratios(logprobs_DT, sampling_logprobs_DT, ratio_mask_DT, offsets_D)
    ratio_DT = (log_ratio_DT + (logprobs_DT - logprobs_DT.detach())).exp()
    return -clip_objective(ratio_DT, advantages_DT, clip_low_threshold, clip_high_threshold).sum()
