"""What the gradients of a step's terms say about each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# `term/<name>/...` of every term; its own metrics stand beside them.
ROW_METRICS = frozenset(
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
    )
)


@dataclass(frozen=True, slots=True)
class GradientStats:
    """Norms and angles of ``K`` gradients of ``(N,)``, float64.

    Attributes:
        norms_K: L2 norm of each gradient, before its weight.
        weighted_norms_K: weight times norm.
        shares_K: weighted norm over the sum of all weighted norms, the base loss's among them: in [0, 1], and
            their sum is 1. It measures how hard each term pulls, not where to; directions are in the cosines.
        cosines_KK: cosine of the angle between each two gradients, in [-1, 1]; below 0 they conflict. 0 where
            one of them is zero, which neither helps nor hinders.
    """

    norms_K: Tensor
    weighted_norms_K: Tensor
    shares_K: Tensor
    cosines_KK: Tensor


def scalar_products(gradients_KDT: Tensor) -> Tensor:
    """The scalar product of each two of ``K`` gradients: ``(K, N) -> (K, K)``.

    >>> scalar_products(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor([[25.,  4.],
            [ 4.,  1.]])
    """
    flat_KN = gradients_KDT.flatten(1)
    return flat_KN @ flat_KN.T


def all_finite(tensor: Tensor) -> bool:
    """Whether every element is finite; a finite sum says so in a tenth of the time."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def compare_gradients(products_KK: Tensor, weights_K: Tensor) -> GradientStats:
    """Norms, shares and cosines of the gradients of one step.

    Args:
        products_KK: float64 ``(K, K)``, their scalar products before their weights.
        weights_K: float64 ``(K,)``, at least 0.

    >>> stats = compare_gradients(torch.tensor([[25.0, 4.0], [4.0, 1.0]]), torch.tensor([1.0, 5.0]))
    >>> stats.shares_K, stats.cosines_KK[0, 1]
    (tensor([0.5000, 0.5000]), tensor(0.8000))
    """
    norms_K = products_KK.diagonal().sqrt()
    weighted_norms_K = weights_K * norms_K
    return GradientStats(
        norms_K,
        weighted_norms_K,
        shares_K=_ratio(weighted_norms_K, weighted_norms_K.sum()),
        cosines_KK=_ratio(products_KK, norms_K[:, None] * norms_K).clamp(-1, 1),
    )


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, and 0 for 0 / 0."""
    return numerator / torch.where(denominator == 0, 1.0, denominator)
