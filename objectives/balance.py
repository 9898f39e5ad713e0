"""Balancing rules: other weights for the terms of a step, from how their gradients lie to each other.

Both see gradients with respect to the logprobs, which is where the terms of an objective meet.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from objectives.errors import ObjectiveError
from objectives.spec import BalanceSpec, GradNormSpec


class Balance(Protocol):
    """A rule that gives each term of a step the weight that it is trained with."""

    def weights(
        self, names_K: Sequence[str], values_K: Sequence[float], weights_K: Tensor, products_KK: Tensor, step: int
    ) -> Tensor:
        """The weights in force, float64 ``(K,)``.

        Args:
            names_K, values_K: the terms, the base loss first, and their values before weights.
            weights_K: float64 ``(K,)``, the weights that the objective gives them.
            products_KK: float64 ``(K, K)``, the scalar products of their gradients before weights.
            step: what a rule that draws draws by.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on with, as plain data."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; an empty one is the beginning."""
        ...


def make_balance(spec: BalanceSpec | None) -> Balance | None:
    """The rule that a spec names."""
    if spec is None:
        return None
    return GradNorm(spec) if isinstance(spec, GradNormSpec) else PCGrad()


class PCGrad:
    """Projecting conflicting gradients.

    Of each weighted gradient, what points against another one is taken away, in random order; the sum of what is left
    is trained. A projection takes multiples of the other gradients away, so that their scalar products are enough
    and what comes out is one weight for each term.

    Source: Yu et al. 2020, "Gradient Surgery for Multi-Task Learning" (arXiv:2001.06782), algorithm 1.
    """

    def weights(
        self, names_K: Sequence[str], values_K: Sequence[float], weights_K: Tensor, products_KK: Tensor, step: int
    ) -> Tensor:
        weighted_KK = weights_K[:, None] * products_KK * weights_K
        draw = random.Random(step)  # so that a resumed run draws what it would have drawn
        factors_K = torch.zeros_like(weights_K)
        for i in range(len(weights_K)):
            left_K = torch.zeros_like(weights_K)  # what is left of gradient i, in terms of all of them
            left_K[i] = 1.0
            others = [j for j in range(len(weights_K)) if j != i]
            for j in draw.sample(others, len(others)):
                along = (left_K * weighted_KK[j]).sum()
                if along < 0:
                    left_K[j] -= along / weighted_KK[j, j]
            factors_K += left_K
        return weights_K * factors_K

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """There is nothing to go on with: it draws by the step."""


class GradNorm:
    """Gradient normalization: weights learned so that the terms' gradients have comparable norms.

    ``G_k = e_k w_k |g_k|`` is drawn to ``mean(G) r_k^alpha``, where ``r_k`` is how much of its first value the term
    still has, over the mean of that; ``e_k``, at first 1, moves down the gradient of
    ``sum_k |G_k - mean(G) r_k^alpha| / mean(G)``, whose target is constant, and all ``e_k`` are scaled to mean 1. The
    division by ``mean(G)`` is not in the paper; it makes the learning rate free of the gradients' unit. Terms without
    a gradient or a weight take no part.

    Source: Chen et al. 2018, "GradNorm: Gradient Normalization for Adaptive Loss Balancing in Deep Multitask
    Networks" (arXiv:1711.02257), equations 1 and 2.

    Raises:
        ObjectiveError: a term has a value below 0, of which no ratio says how much is left.
    """

    def __init__(self, spec: GradNormSpec) -> None:
        self._alpha, self._learning_rate = spec.alpha, spec.learning_rate
        self._factors: dict[str, float] = {}
        self._first_values: dict[str, float] = {}

    def weights(
        self, names_K: Sequence[str], values_K: Sequence[float], weights_K: Tensor, products_KK: Tensor, step: int
    ) -> Tensor:
        pulls_K = weights_K * products_KK.diagonal().sqrt()
        active = [k for k in range(len(weights_K)) if pulls_K[k] > 0]
        factors_K = torch.tensor([self._factors.get(name, 1.0) for name in names_K], dtype=torch.float64)
        if active:
            rates = torch.tensor([self._left(names_K[k], values_K[k]) for k in active], dtype=torch.float64)
            self._learn([names_K[k] for k in active], factors_K[active], pulls_K[active], rates)
        return weights_K * factors_K

    def _left(self, name: str, value: float) -> float:
        """How much of its first value above 0 a term still has; 1 before there is one."""
        if value < 0:
            raise ObjectiveError(
                f"The balance 'gradnorm' compares how much of their first value the terms still have, and "
                f"term {name!r} has the value {value:g}: leave that term out, or take the balance 'pcgrad'."
            )
        if value > 0:
            self._first_values.setdefault(name, value)
        return value / self._first_values[name] if name in self._first_values else 1.0

    def _learn(self, names: Sequence[str], factors: Tensor, pulls: Tensor, rates: Tensor) -> None:
        """The factors of the next step."""
        norms = factors * pulls
        mean = norms.mean()
        mean_rate = rates.mean()
        relative = rates / mean_rate if mean_rate > 0 else torch.ones_like(rates)
        slopes = torch.sign(norms - mean * relative**self._alpha) * pulls / mean
        moved = (factors - self._learning_rate * slopes).clamp(min=1e-3)
        self._factors |= dict(zip(names, (moved / moved.mean()).tolist(), strict=True))

    def state(self) -> dict[str, Any]:
        return {"factors": dict(self._factors), "first_values": dict(self._first_values)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._factors = dict(state.get("factors", {}))
        self._first_values = dict(state.get("first_values", {}))
