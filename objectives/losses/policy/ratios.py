"""Importance ratios between the policy in training (p) and the policy that sampled the data (q), and their metrics."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# A bound of a clipped ratio: one number, or one per token.
Threshold = float | Tensor


def token_log_ratios(logprobs_DT: Tensor, sampling_logprobs_DT: Tensor, advantages_DT: Tensor) -> Tensor:
    """Return ``log r = log p - log q`` of each token, ``(N,)``; 0 for a token with advantage 0.

    >>> token_log_ratios(torch.tensor([-1.0, -9.0]), torch.tensor([-2.0, 0.0]), torch.tensor([0.5, 0.0]))
    tensor([1., 0.])
    """
    # Mask before the exponential: 0 * exp(1000), as for a prompt token, would be NaN.
    return torch.where(advantages_DT != 0, logprobs_DT - sampling_logprobs_DT, 0.0)


def summed_log_ratios(
    logprobs_DT: Tensor, sampling_logprobs_DT: Tensor, trained_DT: Tensor, offsets_D: Tensor
) -> Tensor:
    """Return ``log p(sequence) - log q(sequence)``, the sum over the trained tokens of each sequence, ``(D,)``.

    The exponential of the sum is the importance weight of a sequence that q sampled. The sum is differentiable with
    respect to ``logprobs_DT``.

    Args:
        trained_DT: bool ``(N,)``: the sampled tokens.
        offsets_D: ``(D + 1,)``: sequence ``d`` is ``[offsets_D[d], offsets_D[d + 1])``.

    >>> mask = torch.tensor([True, True, False])
    >>> summed_log_ratios(torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-2.0, -4.0, 0.0]), mask, torch.tensor([0, 3]))
    tensor([3.])
    """
    # Mask before the exponential: 0 * exp(1000), as for a prompt token, would be NaN.
    log_ratio_DT = torch.where(trained_DT, logprobs_DT - sampling_logprobs_DT, 0.0)
    return torch.segment_reduce(log_ratio_DT, "sum", offsets=offsets_D, axis=0)


def sequence_log_ratios(
    logprobs_DT: Tensor, sampling_logprobs_DT: Tensor, ratio_mask_DT: Tensor, offsets_D: Tensor | None
) -> Tensor:
    """Return the mean log-ratio of each sequence, repeated for each of its tokens: ``(N,)``, without gradient.

    Args:
        ratio_mask_DT: ``(N,)``: the mean is over tokens of non-zero mask; a sequence without such a token has 0.
        offsets_D: ``(D + 1,)``: sequence ``d`` is ``[offsets_D[d], offsets_D[d + 1])``. ``None`` if all tokens are one
            sequence; the result is then 0-d.

    >>> lp, mask = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1, 1, 1])
    >>> sequence_log_ratios(lp, torch.tensor([-1.0, -4.0, -3.0]), mask, torch.tensor([0, 2, 3]))
    tensor([1., 1., 0.])
    """
    log_ratio_DT, mask_DT = (logprobs_DT - sampling_logprobs_DT).detach(), ratio_mask_DT != 0
    if offsets_D is None:
        return torch.where(mask_DT, log_ratio_DT, 0.0).sum() / mask_DT.sum().clamp(min=1)
    log_ratio_D = mean_by_sequence(log_ratio_DT, mask_DT, offsets_D)
    return log_ratio_D.repeat_interleave(offsets_D.diff())


def clip_objective(
    ratio_DT: Tensor, advantages_DT: Tensor, clip_low_threshold: Threshold, clip_high_threshold: Threshold
) -> Tensor:
    """Return the clipped objective ``min(r A, clip(r, low, high) A)`` of each token, to be maximized, ``(N,)``."""
    clipped_DT = clip_ratios(ratio_DT, clip_low_threshold, clip_high_threshold)
    return torch.minimum(ratio_DT * advantages_DT, clipped_DT * advantages_DT)


def clip_ratios(ratio_DT: Tensor, clip_low_threshold: Threshold, clip_high_threshold: Threshold) -> Tensor:
    """Clamp the ratios to two bounds; a bound is one number or one per token."""
    if not isinstance(clip_low_threshold, Tensor) and not isinstance(clip_high_threshold, Tensor):
        return ratio_DT.clamp(clip_low_threshold, clip_high_threshold)
    low_DT, high_DT = (
        torch.as_tensor(bound, dtype=ratio_DT.dtype, device=ratio_DT.device)
        for bound in (clip_low_threshold, clip_high_threshold)
    )
    return ratio_DT.clamp(low_DT, high_DT)


class RatioMetrics(NamedTuple):
    """Ratio metrics of each sequence over its tokens of non-zero advantage, ``(D,)`` each.

    A sequence without such tokens has the on-policy values 1, 1, 0, 0.

    Attributes:
        mean_D: mean ratio.
        max_D: maximum ratio.
        clip_fraction_D: share of tokens with a ratio outside the bounds.
        kl_k1_D: nats: mean of ``log q - log p``, the k1 estimate of KL(q || p).
    """

    mean_D: Tensor
    max_D: Tensor
    clip_fraction_D: Tensor
    kl_k1_D: Tensor


def compute_ratio_metrics(
    log_ratio_DT: Tensor, trained_DT: Tensor, offsets_D: Tensor, clip_low: Threshold, clip_high: Threshold
) -> RatioMetrics:
    """Compute the metrics of packed log-ratios.

    Args:
        trained_DT: bool ``(N,)``: the tokens of non-zero advantage.

    >>> log_ratio, trained = torch.tensor([0.5, 1.5, 9.0]).log(), torch.tensor([True, True, False])
    >>> metrics = compute_ratio_metrics(log_ratio, trained, torch.tensor([0, 2, 3]), 0.8, 2.0)
    >>> metrics.mean_D, metrics.clip_fraction_D
    (tensor([1., 1.]), tensor([0.5000, 0.0000]))
    """
    log_ratio_DT = torch.where(trained_DT, log_ratio_DT.detach(), 0.0)
    ratio_DT = log_ratio_DT.exp()
    outside_DT = ((ratio_DT < clip_low) | (ratio_DT > clip_high)).to(ratio_DT.dtype)
    untrained_D = mean_by_sequence(trained_DT.to(ratio_DT.dtype), torch.ones_like(trained_DT), offsets_D) == 0
    greatest_D = torch.segment_reduce(torch.where(trained_DT, ratio_DT, 0.0), "max", offsets=offsets_D, axis=0)
    return RatioMetrics(
        mean_D=torch.where(untrained_D, 1.0, mean_by_sequence(ratio_DT, trained_DT, offsets_D)),
        max_D=torch.where(untrained_D, 1.0, greatest_D),
        clip_fraction_D=mean_by_sequence(outside_DT, trained_DT, offsets_D),
        kl_k1_D=-mean_by_sequence(log_ratio_DT, trained_DT, offsets_D),
    )


def mean_by_sequence(values_DT: Tensor, mask_DT: Tensor, offsets_D: Tensor) -> Tensor:
    """Mean of each sequence's values over tokens with a true mask, ``(D,)``; 0 for a sequence without such tokens."""
    sums_D = torch.segment_reduce(torch.where(mask_DT, values_DT, 0.0), "sum", offsets=offsets_D, axis=0)
    counts_D = torch.segment_reduce(mask_DT.to(values_DT.dtype), "sum", offsets=offsets_D, axis=0)
    return sums_D / counts_D.clamp(min=1)
