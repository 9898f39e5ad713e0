"""Kahneman-Tversky optimization: answers that are good or bad by themselves, without pairs."""

from __future__ import annotations

import torch
from torch import Tensor


def kto(
    log_ratio_D: Tensor,
    desirable_D: Tensor,
    divergence: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """``w (1 - sigmoid(+-beta (log r - z)))`` of each answer, ``(D,)``: plus for a desirable one, minus for another.

    Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv:2402.01306),
    equations 7 and 8.

    Args:
        log_ratio_D: nats, ``(D,)``: log-probability of each answer under the policy less that under the reference.
        desirable_D: bool ``(D,)``.
        divergence: 0-d, nats: the policy's divergence from the reference, z; a constant here, and taken as at least 0.
        beta: how strongly the policy is held to the reference, per nat.
        desirable_weight: weight of the desirable answers.
        undesirable_weight: weight of the others.

    >>> kto(torch.tensor([0.0, 0.0]), torch.tensor([True, False]), torch.tensor(0.0))
    tensor([0.5000, 0.5000])
    """
    distance_D = beta * (log_ratio_D - divergence.detach().clamp(min=0))
    weight_D = torch.where(desirable_D, desirable_weight, undesirable_weight).to(log_ratio_D.dtype)
    return weight_D * torch.where(desirable_D, -distance_D, distance_D).sigmoid()
