"""Balancing rules, which adapt the weights of terms at each step to the scalar products of their gradients.

The gradients are with respect to the logprobs. All rules except GradNorm are TorchJD's (torchjd.org), applied to the
Gramian matrix that the diagnostics of a step need anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from objectives.config.spec import AlignedMTLSpec, BalanceSpec, CAGradSpec, GradNormSpec, WeightingSpec
from objectives.errors import ObjectiveError

BalanceState: TypeAlias = Mapping[str, Mapping[str, float]]
"""State of a rule for resuming a run: numbers of each term by the name of the quantity, as JSON data."""

Weighting: TypeAlias = Callable[[Tensor], Tensor]
"""Map from a Gramian matrix ``(K, K)`` to the factors of its gradients ``(K,)``."""

# MGDA of TorchJD approximates the shortest vector by Frank-Wolfe steps. Its defaults, 1e-3 and 100, leave 13 % of the
# smallest gradient's norm in one of 20 random cases; these values leave 2 % and take 20 ms.
MGDA_EPSILON, MGDA_STEPS = 1e-5, 1000

# TorchJD adds this share of the trace to the diagonal of the Gramian. With its default, 1e-4, a gradient whose norm is
# below about 1 % of that of all gradients together may remain in conflict with the total (decision 20).
PROJECTION_EPSILON = 1e-10


class Balance(Protocol):
    """Rule that computes a factor for the weight of each term at a step."""

    def factors(self, names_K: Sequence[str], values_K: Sequence[float], gramian_KK: Tensor, step: int) -> Tensor:
        """Compute the factors, float64 ``(K,)``.

        Args:
            names_K, values_K: the balanced terms, the base loss first, and their unweighted values.
            gramian_KK: float64 ``(K, K)``, the scalar products of the weighted gradients; no gradient is zero.
            step: step of the run, from 0.

        Raises:
            ObjectiveError: the rule does not accept a value.
        """
        ...

    def state(self) -> BalanceState:
        """Return the state for resuming a run."""
        ...

    def restore(self, state: BalanceState) -> None:
        """Restore a state; an empty state resets."""
        ...


def make_balance(spec: BalanceSpec, seed: int = 0) -> Balance:
    """Create the rule of a spec.

    Args:
        seed: seed of the rules that draw random numbers, `pcgrad` and `random`; the run's seed.

    Raises:
        ObjectiveError: the rule needs a library that is not installed.
    """
    return GradNorm(spec) if isinstance(spec, GradNormSpec) else GramianBalance(spec, seed)


def balance_weights(
    balance: Balance,
    rows: Sequence[tuple[str, float]],
    weights_K: Tensor,
    products_KK: Tensor,
    step: int,
    left_out: Collection[int] = (),
) -> Tensor:
    """Compute the balanced weights of a step, float64 ``(K,)``.

    Weights scale the gradients before they are balanced, so a rule multiplies each weight by a factor. Terms that are
    left out of the balancing keep their weights.

    Args:
        rows: name and unweighted value of each term, the base loss first.
        weights_K: float64 ``(K,)``, the weights of the objective.
        products_KK: float64 ``(K, K)``, the scalar products of the unweighted gradients.
        left_out: rows of the terms with a target, which sets their strength; a factor would undo it. Terms with a zero
            gradient are left out as well: it has no direction, and MGDA would stop the training for it.
    """
    gramian_KK = weights_K[:, None] * products_KK * weights_K
    balanced = [k for k in gramian_KK.diagonal().nonzero().flatten().tolist() if k not in left_out]
    balanced_K = weights_K.clone()
    if balanced:
        names, values = [rows[k][0] for k in balanced], [rows[k][1] for k in balanced]
        balanced_K[balanced] *= balance.factors(names, values, gramian_KK[balanced][:, balanced], step)
    return balanced_K


class GramianBalance:
    """Rule of TorchJD that computes weights from a Gramian matrix.

    The factors of rules that average the gradients are multiplied by the number of gradients, so that all rules replace
    the sum of the weighted gradients: without a conflict, `upgrad` and `dualproj` change nothing. The Gramian is
    divided by its trace, because TorchJD takes gradients with a squared norm below 1e-4 for zero.

    Raises:
        ObjectiveError: the rule needs a library that is not installed.
    """

    def __init__(self, spec: WeightingSpec | AlignedMTLSpec | CAGradSpec, seed: int = 0) -> None:
        self._weighting = _find_weighting(spec)
        self._averages = spec.method != "pcgrad"
        self._seed = seed

    def factors(self, names_K: Sequence[str], values_K: Sequence[float], gramian_KK: Tensor, step: int) -> Tensor:
        if len(gramian_KK) == 1:
            return torch.ones(1, dtype=gramian_KK.dtype)
        with SeededDraws(step_seed(self._seed, step)):
            factors_K = self._weighting(gramian_KK / gramian_KK.trace())
        return len(factors_K) * factors_K if self._averages else factors_K

    def state(self) -> BalanceState:
        return {}

    def restore(self, state: BalanceState) -> None:
        """Do nothing: the factors depend only on the gradients, the seed and the step."""


def _find_weighting(spec: WeightingSpec | AlignedMTLSpec | CAGradSpec) -> Weighting:
    # Imported on first use: the import takes a second.
    from torchjd import aggregation
    from torchjd.linalg import QuadprogProjector

    if isinstance(spec, AlignedMTLSpec):
        return aggregation.AlignedMTLWeighting(scale_mode=spec.scale)
    if isinstance(spec, CAGradSpec):
        try:
            return aggregation.CAGradWeighting(c=spec.c)
        except ImportError as error:
            raise ObjectiveError(
                f"The balance 'cagrad' needs an extra that cannot be imported ({error}); run "
                "pip install 'tinker-flows[cagrad]'."
            ) from error
    projector = QuadprogProjector(reg_eps=PROJECTION_EPSILON)
    weightings: Mapping[str, Callable[[], Weighting]] = {
        "upgrad": lambda: aggregation.UPGradWeighting(projector=projector),
        "dualproj": lambda: aggregation.DualProjWeighting(projector=projector),
        "mgda": lambda: aggregation.MGDAWeighting(MGDA_EPSILON, MGDA_STEPS),
        "imtl_g": aggregation.IMTLGWeighting,
        "pcgrad": aggregation.PCGradWeighting,
        "random": aggregation.RandomWeighting,
    }
    return weightings[spec.method]()


def step_seed(seed: int, step: int) -> int:
    """Derive the seed of a step from the seed of a run."""
    return int.from_bytes(hashlib.sha256(f"balance {seed} {step}".encode()).digest()[:4], "big")


class SeededDraws(TorchFunctionMode):
    """Context in which torch's random functions draw from a generator of their own.

    It applies to the current thread only. Reseeding torch's global generator, which all threads share, would change the
    random numbers of other runs in this process.

    >>> with SeededDraws(0):
    ...     first = torch.rand(2)
    >>> with SeededDraws(0):
    ...     torch.equal(torch.rand(2), first)
    True
    """

    _FUNCTIONS = frozenset((torch.rand, torch.randn, torch.randint, torch.randperm))

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        generator = {"generator": self._generator} if func in self._FUNCTIONS else {}
        return func(*args, **generator, **(kwargs or {}))


class GradNorm:
    """GradNorm: learn weights that give the gradients of all terms comparable norms.

    The weighted norm ``G_k = e_k w_k |g_k|`` is pulled to ``mean(G) r_k^alpha``. ``r_k`` is the term's value divided by
    its first positive value, relative to the mean of this ratio over the terms. ``e_k`` starts at 1 and takes gradient
    steps on ``sum_k |G_k - mean(G) r_k^alpha| / mean(G)`` with a constant target; then all ``e_k`` are clamped to at
    least 1e-3 and scaled to their sum before the step, which is 1 on average. The division by ``mean(G)`` is not in the
    paper; it makes the learning rate independent of the gradients' unit. A term that is not due, or has a zero gradient
    or a zero weight, keeps its factor, and so does a term that is alone.

    Source: Chen et al. 2018, "GradNorm: Gradient Normalization for Adaptive Loss Balancing in Deep Multitask
    Networks" (arXiv:1711.02257), equations 1 and 2.

    `factors` raises an ObjectiveError for a term with a negative value, for which the ratio is undefined.
    """

    def __init__(self, spec: GradNormSpec) -> None:
        self._alpha, self._learning_rate = spec.alpha, spec.learning_rate
        self._factors: dict[str, float] = {}
        self._first_values: dict[str, float] = {}

    def factors(self, names_K: Sequence[str], values_K: Sequence[float], gramian_KK: Tensor, step: int) -> Tensor:
        factors_K = torch.tensor([self._factors.get(name, 1.0) for name in names_K], dtype=torch.float64)
        ratios_K = torch.tensor(
            [self._loss_ratio(name, value) for name, value in zip(names_K, values_K, strict=True)], dtype=torch.float64
        )
        self._learn(names_K, factors_K, gramian_KK.diagonal().sqrt(), ratios_K)
        return factors_K

    def _loss_ratio(self, name: str, value: float) -> float:
        """Value of a term divided by its first positive value; 1 before the first positive value."""
        if value < 0:
            raise ObjectiveError(
                f"The balance 'gradnorm' needs values of at least 0, but term {name!r} has the value {value:g}; remove "
                "this term, or choose another balance."
            )
        if value > 0:
            self._first_values.setdefault(name, value)
        return value / self._first_values[name] if name in self._first_values else 1.0

    def _learn(self, names: Sequence[str], factors: Tensor, norms: Tensor, ratios: Tensor) -> None:
        """Update the factors for the next step."""
        scaled_norms = factors * norms
        mean = scaled_norms.mean()
        mean_ratio = ratios.mean()
        relative = ratios / mean_ratio if mean_ratio > 0 else torch.ones_like(ratios)
        slopes = torch.sign(scaled_norms - mean * relative**self._alpha) * norms / mean
        updated = (factors - self._learning_rate * slopes).clamp(min=1e-3)
        self._factors |= dict(zip(names, (updated * factors.sum() / updated.sum()).tolist(), strict=True))

    def state(self) -> BalanceState:
        return {"factors": dict(self._factors), "first_values": dict(self._first_values)}

    def restore(self, state: BalanceState) -> None:
        self._factors = dict(state.get("factors", {}))
        self._first_values = dict(state.get("first_values", {}))
