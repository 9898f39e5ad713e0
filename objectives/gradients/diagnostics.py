"""Norms, shares and cosines of the gradients of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Names of the metrics `term/<name>/...` that runs compute; a term's own metrics need other names.
RESERVED_TERM_METRICS = frozenset(
    (
        "value",
        "weight",
        "contribution",
        "grad_norm",
        "grad_norm_weighted",
        "grad_share",
        "cosine_to_base",
        "duration_s",
        "grad_share_ema",
        "skipped",
        "weight_balanced",
        "trained_prompts",
        "effect",
        "multiplier",
        "violation",
        "at_bound",
    )
)


@dataclass(frozen=True, slots=True)
class GradientStats:
    """Norms and angles of ``K`` gradients of shape ``(N,)``, float64.

    Attributes:
        norms_K: L2 norm of each unweighted gradient.
        weighted_norms_K: norm of each weighted gradient.
        shares_K: weighted norm divided by the sum of all weighted norms, including the base loss's; in [0, 1], with
            sum 1, or all 0 if every gradient is zero. Shares measure the strength of each term; the cosines measure the
            directions.
        cosines_KK: cosine of each pair of gradients, in [-1, 1]; negative for a conflict, 0 if a gradient is zero.
    """

    norms_K: Tensor
    weighted_norms_K: Tensor
    shares_K: Tensor
    cosines_KK: Tensor


def scalar_products(gradients_KDT: Tensor) -> Tensor:
    """Scalar products of all pairs of ``K`` gradients: ``(K, N) -> (K, K)``.

    >>> scalar_products(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor([[25.,  4.],
            [ 4.,  1.]])
    """
    flat_KN = gradients_KDT.flatten(1)
    return flat_KN @ flat_KN.T


def all_finite(tensor: Tensor) -> bool:
    """Check that every element is finite; a finite sum proves it in a tenth of the time."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def compare_gradients(products_KK: Tensor, weighted_norms_K: Tensor) -> GradientStats:
    """Compute norms, shares and cosines of the gradients of one step.

    Args:
        products_KK: float64 ``(K, K)``, scalar products of the unweighted gradients.
        weighted_norms_K: float64 ``(K,)``, norms of the weighted gradients.

    >>> stats = compare_gradients(torch.tensor([[25.0, 4.0], [4.0, 1.0]]), torch.tensor([5.0, 5.0]))
    >>> stats.norms_K, stats.shares_K, stats.cosines_KK[0, 1]
    (tensor([5., 1.]), tensor([0.5000, 0.5000]), tensor(0.8000))
    """
    norms_K = products_KK.diagonal().sqrt()
    return GradientStats(
        norms_K,
        weighted_norms_K,
        shares_K=_ratio(weighted_norms_K, weighted_norms_K.sum()),
        cosines_KK=_ratio(products_KK, norms_K[:, None] * norms_K).clamp(-1, 1),
    )


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient with 0 for 0 / 0."""
    return numerator / torch.where(denominator == 0, 1.0, denominator)
