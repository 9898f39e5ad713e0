"""How far the policy has moved from the one that sampled the data: ratios, and what to log of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# A bound of a clipped ratio: one number, or one per token.
Threshold = float | Tensor


def token_log_ratios(logprobs_DT: Tensor, sampling_logprobs_DT: Tensor, advantages_DT: Tensor) -> Tensor:
    """``log r = log p - log q`` of each token, ``(N,)``; 0 where the advantage is 0: such a token takes no part.

    >>> token_log_ratios(torch.tensor([-1.0, -9.0]), torch.tensor([-2.0, 0.0]), torch.tensor([0.5, 0.0]))
    tensor([1., 0.])
    """
    # Chosen before an exponential is taken: 0 * exp(1000), of a prompt token, would be NaN.
    return torch.where(advantages_DT != 0, logprobs_DT - sampling_logprobs_DT, 0.0)


def sequence_log_ratios(
    logprobs_DT: Tensor, sampling_logprobs_DT: Tensor, ratio_mask_DT: Tensor, offsets_D: Tensor | None
) -> Tensor:
    """Mean of each sequence's token log-ratios, given to all its tokens: ``(N,)``, a constant.

    Args:
        ratio_mask_DT: ``(N,)``: the tokens of non-zero mask make the mean; a sequence without one has 0.
        offsets_D: ``(D + 1,)``: sequence ``d`` is ``[offsets_D[d], offsets_D[d + 1])``; ``None`` where all tokens are
            one sequence, whose mean is then returned 0-d.

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
    """The pessimistic objective ``min(r A, clip(r, low, high) A)`` of each token, to be maximised, ``(N,)``."""
    clipped_DT = clip_ratios(ratio_DT, clip_low_threshold, clip_high_threshold)
    return torch.minimum(ratio_DT * advantages_DT, clipped_DT * advantages_DT)


def clip_ratios(ratio_DT: Tensor, clip_low_threshold: Threshold, clip_high_threshold: Threshold) -> Tensor:
    """The ratios held between two bounds, each one number or one per token."""
    if not isinstance(clip_low_threshold, Tensor) and not isinstance(clip_high_threshold, Tensor):
        return ratio_DT.clamp(clip_low_threshold, clip_high_threshold)
    low_DT, high_DT = (
        torch.as_tensor(bound, dtype=ratio_DT.dtype, device=ratio_DT.device)
        for bound in (clip_low_threshold, clip_high_threshold)
    )
    return ratio_DT.clamp(low_DT, high_DT)


class RatioMetrics(NamedTuple):
    """What to watch of a policy loss, per sequence over its tokens of non-zero advantage, ``(D,)`` each.

    A sequence without such a token counts as one that the policy has not moved on: 1, 1, 0, 0.

    Attributes:
        mean_D: mean ratio.
        max_D: greatest ratio.
        clip_fraction_D: share of tokens whose ratio lies outside the bounds.
        kl_k1_D: nats: mean of ``log q - log p``, the k1 estimate of the sampling policy's KL from this one.
    """

    mean_D: Tensor
    max_D: Tensor
    clip_fraction_D: Tensor
    kl_k1_D: Tensor


def compute_ratio_metrics(
    log_ratio_DT: Tensor, trained_DT: Tensor, offsets_D: Tensor, clip_low: Threshold, clip_high: Threshold
) -> RatioMetrics:
    """Metrics of packed log-ratios.

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
    has_none_D = mean_by_sequence(trained_DT.to(ratio_DT.dtype), torch.ones_like(trained_DT), offsets_D) == 0
    greatest_D = torch.segment_reduce(torch.where(trained_DT, ratio_DT, 0.0), "max", offsets=offsets_D, axis=0)
    return RatioMetrics(
        mean_D=torch.where(has_none_D, 1.0, mean_by_sequence(ratio_DT, trained_DT, offsets_D)),
        max_D=torch.where(has_none_D, 1.0, greatest_D),
        clip_fraction_D=mean_by_sequence(outside_DT, trained_DT, offsets_D),
        kl_k1_D=-mean_by_sequence(log_ratio_DT, trained_DT, offsets_D),
    )


def mean_by_sequence(values_DT: Tensor, mask_DT: Tensor, offsets_D: Tensor) -> Tensor:
    """Mean of each sequence's masked values, ``(D,)``; 0 where nothing is masked in."""
    sums_D = torch.segment_reduce(torch.where(mask_DT, values_DT, 0.0), "sum", offsets=offsets_D, axis=0)
    counts_D = torch.segment_reduce(mask_DT.to(values_DT.dtype), "sum", offsets=offsets_D, axis=0)
    return sums_D / counts_D.clamp(min=1)
