"""Weighted negative log-likelihood, the supervised loss; every linearized objective is sent as this loss."""

from __future__ import annotations

from torch import Tensor


def cross_entropy(logprobs_DT: Tensor, weights_DT: Tensor) -> Tensor:
    """Weighted negative log-likelihood, ``-sum(weights * logprobs)``.

    Weights may be fractional or negative. Trailing axes (top-K targets) are summed as well.

    Args:
        logprobs_DT: nats, ``(N,)`` or ``(N, K)``.
        weights_DT: the same shape.

    Returns:
        A 0-d tensor, nats.

    >>> import torch
    >>> cross_entropy(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 0.5]))
    tensor(2.)
    """
    return -(logprobs_DT * weights_DT).sum()


def compute_mean_nll(logprobs_DT: Tensor, weights_DT: Tensor) -> float:
    """Weighted mean negative log-likelihood, nats per token: `cross_entropy` divided by the sum of the weights."""
    return float(cross_entropy(logprobs_DT, weights_DT) / weights_DT.sum())


def weights_cancel(weights_DT: Tensor) -> bool:
    """Return whether positive and negative weights add up to 0, up to rounding, so that there is no weighted mean.

    >>> import torch
    >>> weights_cancel(torch.tensor([0.1, 0.2, -0.3])), weights_cancel(torch.tensor([0.1, 0.2, -0.2]))
    (True, False)
    """
    weights_DT = weights_DT.double()
    return float(weights_DT.sum().abs()) < 1e-6 * float(weights_DT.abs().sum())
