"""Critic-free clipped policy losses for groups of completions: grpo, dr_grpo and dapo.

The losses differ in how they normalize by the length of a completion.
"""

from __future__ import annotations

from torch import Tensor

from objectives.losses.policy.ratios import Threshold, clip_objective, mean_by_sequence, token_log_ratios


def grpo(
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    offsets_D: Tensor,
    *,
    clip_low_threshold: Threshold = 0.8,
    clip_high_threshold: Threshold = 1.2,
) -> Tensor:
    """GRPO, ``-mean_d mean_t min(r A, clip(r, low, high) A)``, normalized by each completion's length; 0-d.

    All completions have the same weight, so a token of a long completion has less weight: each token of a long wrong
    completion is penalized less.

    Source: Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300), equation 3, without its divergence from a reference,
    which is the regularizer ``kl``. For its advantages, use `objectives.advantages.centre_by_group` with
    ``scale=True``.

    Args:
        logprobs_DT: nats, ``(N,)``, under the policy in training, p.
        sampling_logprobs_DT: nats, ``(N,)``, under the policy that sampled the tokens, q; ``r = p / q``.
        advantages_DT: ``(N,)``; a token with advantage 0 counts in the length only.
        offsets_D: ``(D + 1,)``: completion ``d`` is ``[offsets_D[d], offsets_D[d + 1])``; empty ones are ignored.
        clip_low_threshold: lower bound of the ratio, at least 0; a number, or ``(N,)``.
        clip_high_threshold: upper bound of the ratio; a number, or ``(N,)``.

    >>> import torch
    >>> lp, offsets = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([0, 2, 3])
    >>> grpo(lp, lp, torch.tensor([1.0, 1.0, -1.0]), offsets), dr_grpo(lp, lp, torch.tensor([1.0, 1.0, -1.0]), offsets)
    (tensor(-0.), tensor(-0.5000))
    """
    objective_DT = _objective(logprobs_DT, sampling_logprobs_DT, advantages_DT, clip_low_threshold, clip_high_threshold)
    means_D = mean_by_sequence(objective_DT, objective_DT.new_ones(len(objective_DT)).bool(), offsets_D)
    return -means_D.sum() / _num_completions(offsets_D)


def dr_grpo(
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    offsets_D: Tensor,
    *,
    clip_low_threshold: Threshold = 0.8,
    clip_high_threshold: Threshold = 1.2,
) -> Tensor:
    """Dr. GRPO, ``-mean_d sum_t min(r A, clip(r, low, high) A)``, without normalization by length; 0-d.

    All tokens have the same weight, and the loss grows with the number of tokens.

    Source: Liu et al. 2025, "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2. For its advantages,
    use `objectives.advantages.centre_by_group` with ``scale=False``.

    Args: see `grpo`.
    """
    objective_DT = _objective(logprobs_DT, sampling_logprobs_DT, advantages_DT, clip_low_threshold, clip_high_threshold)
    return -objective_DT.sum() / _num_completions(offsets_D)


def dapo(
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    *,
    clip_low_threshold: Threshold = 0.8,
    clip_high_threshold: Threshold = 1.28,
) -> Tensor:
    """DAPO, ``-mean over all tokens of min(r A, clip(r, low, high) A)`` with an asymmetric clip; 0-d.

    All tokens have the same weight. The larger upper bound ("clip-higher") lets unlikely tokens become likely, which
    delays entropy collapse.

    Source: Yu et al. 2025, "DAPO" (arXiv:2503.14476), equation 8, bounds of its section 4.1. Its dynamic sampling and
    overlong reward shaping belong to the sampler.

    Args: see `grpo`.

    >>> import torch
    >>> dapo(torch.tensor([0.0, -2.0]), torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 1.0]))
    tensor(-1.1400)
    """
    objective_DT = _objective(logprobs_DT, sampling_logprobs_DT, advantages_DT, clip_low_threshold, clip_high_threshold)
    return -objective_DT.sum() / max(1, len(objective_DT))


def _objective(
    logprobs_DT: Tensor, sampling_DT: Tensor, advantages_DT: Tensor, low: Threshold, high: Threshold
) -> Tensor:
    ratio_DT = token_log_ratios(logprobs_DT, sampling_DT, advantages_DT).exp()
    return clip_objective(ratio_DT, advantages_DT, low, high)


def _num_completions(offsets_D: Tensor) -> Tensor:
    return (offsets_D.diff() > 0).sum().clamp(min=1)
