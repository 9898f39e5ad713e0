"""Clipped policy losses for groups of answers without a critic, which differ in what an answer's length does."""

from __future__ import annotations

from torch import Tensor

from objectives.losses.ratios import Threshold, clip_objective, mean_by_sequence, token_log_ratios


def grpo(
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    offsets_D: Tensor,
    *,
    clip_low_threshold: Threshold = 0.8,
    clip_high_threshold: Threshold = 1.2,
) -> Tensor:
    """``-mean_d mean_t min(r A, clip(r, low, high) A)``, each answer divided by its own length; 0-d.

    All answers weigh the same, so a token of a long one weighs less: long wrong answers are hardly pushed down.

    Source: Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300), equation 3, without its divergence from a reference:
    that is the regularizer ``kl``. Its advantages are `objectives.advantages.centre_by_group` with ``scale=True``.

    Args:
        logprobs_DT: nats, ``(N,)``, of the policy in training, p.
        sampling_logprobs_DT: the same tokens under the policy that sampled them, q; ``r = p / q``.
        advantages_DT: ``(N,)``; 0 leaves a token out, but not out of the length.
        offsets_D: ``(D + 1,)``: answer ``d`` is ``[offsets_D[d], offsets_D[d + 1])``; an empty one is not counted.
        clip_low_threshold: least ratio, at least 0; a number, or ``(N,)``.
        clip_high_threshold: greatest ratio; a number, or ``(N,)``.

    >>> import torch
    >>> lp, offsets = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([0, 2, 3])
    >>> grpo(lp, lp, torch.tensor([1.0, 1.0, -1.0]), offsets), dr_grpo(lp, lp, torch.tensor([1.0, 1.0, -1.0]), offsets)
    (tensor(-0.), tensor(-0.5000))
    """
    objective_DT = _objective(logprobs_DT, sampling_logprobs_DT, advantages_DT, clip_low_threshold, clip_high_threshold)
    means_D = mean_by_sequence(objective_DT, objective_DT.new_ones(len(objective_DT)).bool(), offsets_D)
    return -means_D.sum() / _num_answers(offsets_D)


def dr_grpo(
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    offsets_D: Tensor,
    *,
    clip_low_threshold: Threshold = 0.8,
    clip_high_threshold: Threshold = 1.2,
) -> Tensor:
    """``-mean_d sum_t min(r A, clip(r, low, high) A)``: no length is divided out; 0-d.

    Every token weighs the same, whatever answer it is in, and more tokens make a greater loss.

    Source: Liu et al. 2025, "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2. Its advantages are
    `objectives.advantages.centre_by_group` as it is, without a scale.

    Args: as those of `grpo`.
    """
    objective_DT = _objective(logprobs_DT, sampling_logprobs_DT, advantages_DT, clip_low_threshold, clip_high_threshold)
    return -objective_DT.sum() / _num_answers(offsets_D)


def dapo(
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    *,
    clip_low_threshold: Threshold = 0.8,
    clip_high_threshold: Threshold = 1.28,
) -> Tensor:
    """``-mean over all tokens of min(r A, clip(r, low, high) A)``, with more room above than below; 0-d.

    Every token weighs the same. The higher bound above lets an unlikely token become likely ("clip-higher"), which
    keeps the policy from settling early.

    Source: Yu et al. 2025, "DAPO" (arXiv:2503.14476), equation 8, bounds of its section 4.1. Its choice of groups, and
    its reward for length, are the sampler's.

    Args: as those of `grpo`.

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


def _num_answers(offsets_D: Tensor) -> Tensor:
    return (offsets_D.diff() > 0).sum().clamp(min=1)
