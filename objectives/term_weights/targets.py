"""Targets: constraints on the values of terms, whose weights a controller finds during the run.

A target turns the objective into a constrained problem, such as "minimize the base loss such that ``value <= limit``".
Its Lagrangian, ``base + multiplier * (value - limit)``, has the gradient of an objective in which the multiplier is the
term's weight. Dual ascent raises the multiplier while the value is above the limit and lowers it while it is below.
Plain dual ascent is an integral controller, which oscillates; the proportional part damps it (Stooke et al. 2020,
"Responsive Safety in Reinforcement Learning by PID Lagrangian Methods", arXiv:2007.03964, section 5, without their
derivative part).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NotRequired, Protocol, Self, TypeAlias, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from objectives.config.json_schema import form_fields

# A multiplier at its default bound makes a violation of one `scale` cost this many nats of the base loss.
_MAX_COST = 100.0


class TargetSpec(BaseModel):
    """Target of a term's value, which replaces the term's weight."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, json_schema_extra=form_fields)

    at_most: float | None = Field(
        default=None, allow_inf_nan=False, title="At most", description="Upper limit of the mean value."
    )
    at_least: float | None = Field(
        default=None, allow_inf_nan=False, title="At least", description="Lower limit of the mean value."
    )
    equals: float | None = Field(
        default=None, allow_inf_nan=False, title="Equals", description="Value that the mean should equal."
    )
    metric: str | None = Field(
        default=None,
        title="Metric",
        description="Metric of the term to limit instead of the term's value. The term must declare a gradient for "
        "this metric.",
    )
    scale: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        title="Scale",
        description="Size of a large violation, in the unit of the value. The controller does not react faster to "
        "even larger violations. Unset: the absolute value of the limit; if the limit is 0, set `scale`.",
    )
    initial: float = Field(
        default=0.0, allow_inf_nan=False, title="Initial", description="Multiplier at the start and during the warmup."
    )
    lower: float | None = Field(
        default=None,
        allow_inf_nan=False,
        title="Lower bound",
        description="Lower bound of the multiplier. Unset: 0, or minus the upper bound for `equals`.",
    )
    upper: float | None = Field(
        default=None,
        allow_inf_nan=False,
        title="Upper bound",
        description="Upper bound of the multiplier. Unset: `100 / scale`, or `100 / scale * gain_unit` if `gain_unit` "
        "(see `integral_gain`) is above 1.",
    )
    warmup: int = Field(
        default=0, ge=0, title="Warmup (steps)", description="Steps before the multiplier starts to change."
    )
    integral_gain: float = Field(
        default=0.05,
        gt=0,
        allow_inf_nan=False,
        title="Integral gain",
        description="While the violation equals `scale`, each evaluation changes the multiplier by `integral_gain * "
        "gain_unit / scale`. `gain_unit` is 1 for a mean over tokens added to cross-entropy; `docs/targets.md` has the "
        "other cases.",
    )
    proportional_gain: float = Field(
        default=0.5,
        ge=0,
        allow_inf_nan=False,
        title="Proportional gain",
        description="Part of the multiplier that is proportional to the current violation. While the violation equals "
        "`scale`, it is `proportional_gain * gain_unit / scale`.",
    )
    smoothing: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        title="Smoothing",
        description="Decay of the moving average of the values, per evaluation. 0 uses the value of the current batch.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        limits = {name: getattr(self, name) for name in ("at_most", "at_least", "equals")}
        names = [name for name, limit in limits.items() if limit is not None]
        if len(names) != 1:
            problem = f"sets {' and '.join(names)}" if names else "sets no limit"
            raise ValueError(f"a target {problem}; set one of at_most, at_least and equals")
        if self.limit == 0 and self.scale is None:
            raise ValueError("a limit of 0 has no size to compare a violation with; set scale in the unit of the value")
        lower, upper = self.bounds
        if lower >= upper:
            raise ValueError(f"the bounds of the multiplier are {lower:g} and {upper:g}; set lower below upper")
        if lower < 0 and self.equals is None:
            raise ValueError(
                f"lower={lower:g} would train against {names[0]}; set lower to at least 0, or use equals for a "
                "multiplier of either sign"
            )
        # A default bound that depends on the gain unit is not checked: the unit is known only after the first batch.
        highest = math.inf if self.upper is None else upper
        lowest = -math.inf if self.equals is not None and self.lower is None and self.upper is None else lower
        if not lowest <= self.initial <= highest:
            raise ValueError(f"initial={self.initial:g} is outside the bounds {lower:g} and {upper:g}; move it inside")
        return self

    @property
    def limit(self) -> float:
        """Limit of the value."""
        return next(limit for limit in (self.at_most, self.at_least, self.equals) if limit is not None)

    @property
    def large_violation(self) -> float:
        """Size of a large violation: `scale` or its default."""
        return self.scale or abs(self.limit)

    @property
    def sign(self) -> float:
        """-1 for `at_least`, whose multiplier raises the value; else 1."""
        return 1.0 if self.at_least is None else -1.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the multiplier for a gain unit of 1, used before the unit is known."""
        return self.bounds_for(1.0)

    def bounds_for(self, gain_unit: float) -> tuple[float, float]:
        """Return the lower and upper bound of the multiplier."""
        upper = _MAX_COST * max(gain_unit, 1.0) / self.large_violation if self.upper is None else self.upper
        lower = (0.0 if self.equals is None else -upper) if self.lower is None else self.lower
        return lower, upper

    def __str__(self) -> str:
        relation = "at most" if self.at_most is not None else "at least" if self.at_least is not None else "equal to"
        return f"{self.metric or 'value'} {relation} {self.limit:g}"


class Weighted(Protocol):
    """Config with either a weight or a target."""

    @property
    def weight(self) -> object: ...

    @property
    def target(self) -> TargetSpec | None: ...


W = TypeVar("W", bound=Weighted)


def unset_weight(fields: object) -> object:
    """Set the field `weight` to None if there is a target but no weight; `check_weight` rejects a config with both."""
    if isinstance(fields, Mapping) and fields.get("target") is not None:
        return {"weight": None, **fields}
    return fields


def check_weight(config: W) -> W:
    """Check that a config has either a weight or a target.

    Raises:
        ValueError: it has both or neither.
    """
    if config.target is not None and config.weight is not None:
        raise ValueError("it has both a weight and a target, which finds the weight: remove one of them")
    if config.target is None and config.weight is None:
        raise ValueError("it has neither a weight nor a target: set one of them")
    return config


class TargetState(TypedDict):
    """State of one target for resuming a run, as JSON data.

    Attributes:
        average: moving average of the value; None before the first evaluation.
        integral: integral part of the multiplier.
        multiplier: multiplier of the next step.
        gain_unit: factor of the gains; None before the first evaluation, missing in states of older releases.
    """

    average: float | None
    integral: float
    multiplier: float
    gain_unit: NotRequired[float | None]


class TargetController:
    """Controller of the multiplier of one target.

    With the violation ``e = sign * (average - limit) / scale``, clamped to [-1, 1], an evaluation computes::

        integral   = clamp(integral + integral_gain * gain_unit / scale * e, lower, upper)
        multiplier = clamp(integral + proportional_gain * gain_unit / scale * e, lower, upper)

    ``gain_unit`` is `objectives.term_weights.scale.gain_unit` of the term's first batch; 1 if `set_gain_unit` was not
    called before the first evaluation.

    ``average`` is the moving average of the values, because single batches are noisy. The clamp of the violation is
    applied to the average, so the noise of the batches does not bias the mean. At rest, either ``e = 0`` and the
    average is at the limit, or the multiplier is at a bound.

    >>> controller = TargetController(TargetSpec(at_most=0.5, integral_gain=0.1, proportional_gain=0.0))
    >>> [controller.observe(step, 1.0)["multiplier"] for step in range(3)]
    [0.0, 0.2, 0.4]
    """

    def __init__(self, spec: TargetSpec) -> None:
        self.spec = spec
        self._average: float | None = None
        self._integral = self._multiplier = spec.initial
        self._gain_unit: float | None = None

    def set_gain_unit(self, gain_unit: float) -> None:
        """Set the unit of the gains, unless it is set already."""
        if self._gain_unit is None:
            self._gain_unit = gain_unit

    @property
    def weight(self) -> float:
        """Weight of the term at the next step: the multiplier with the sign that moves the value towards the limit."""
        return self.spec.sign * self._multiplier + 0.0  # not -0.0

    def observe(self, step: int, value: float) -> dict[str, float]:
        """Update the multiplier with the value of a step; return the metrics of this step.

        Returns:
            ``multiplier``: the multiplier that the step used; ``violation``: moving average minus limit (`at_least`:
            limit minus moving average), in the unit of the value, positive if the target is violated (`equals`: if the
            value is too high); ``at_bound``: 1 if, after the warmup, a bound of the multiplier keeps the controller
            from meeting the target, else 0.
        """
        self.set_gain_unit(1.0)
        assert self._gain_unit is not None
        spec, gain = self.spec, self._gain_unit / self.spec.large_violation
        lower, upper = spec.bounds_for(self._gain_unit)
        used = self._multiplier
        previous = value if self._average is None else self._average
        self._average = spec.smoothing * previous + (1 - spec.smoothing) * value
        violation = spec.sign * (self._average - spec.limit)
        error = _clamp(violation / spec.large_violation, -1.0, 1.0)
        if step >= spec.warmup:
            self._integral = _clamp(self._integral + spec.integral_gain * gain * error, lower, upper)
            self._multiplier = _clamp(self._integral + spec.proportional_gain * gain * error, lower, upper)
        is_stuck = step >= spec.warmup and (
            (violation > 0 and self._integral == upper)
            or (spec.equals is not None and violation < 0 and self._integral == lower)
        )
        return {"multiplier": used, "violation": violation, "at_bound": float(is_stuck)}

    def state(self) -> TargetState:
        """Return the state for resuming a run."""
        return {
            "average": self._average,
            "integral": self._integral,
            "multiplier": self._multiplier,
            "gain_unit": self._gain_unit,
        }

    def restore(self, state: TargetState | None) -> None:
        """Restore a state; None resets."""
        initial = self.spec.initial
        state = state or {"average": None, "integral": initial, "multiplier": initial, "gain_unit": None}
        self._gain_unit = state.get("gain_unit", 1.0)
        self._average, self._integral, self._multiplier = state["average"], state["integral"], state["multiplier"]


TargetStates: TypeAlias = Mapping[str, TargetState]
"""States of the targets of an objective by the name of the term."""


class Targets:
    """Controllers of the targets of an objective, by the name of the term."""

    def __init__(self, specs: Mapping[str, TargetSpec]) -> None:
        self._controllers = {name: TargetController(spec) for name, spec in specs.items()}

    def __bool__(self) -> bool:
        return bool(self._controllers)

    @property
    def specs(self) -> dict[str, TargetSpec]:
        return {name: controller.spec for name, controller in self._controllers.items()}

    def weight_of(self, name: str) -> float:
        """Return the weight of a term at the next step."""
        return self._controllers[name].weight

    def set_gain_unit(self, name: str, gain_unit: float) -> None:
        """Set the unit of the gains of a term, unless it is set already."""
        self._controllers[name].set_gain_unit(gain_unit)

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Update every multiplier from ``term/<name>/value``; return ``term/<name>/{multiplier,violation,at_bound}``.

        A term that is not due, or was skipped because of an error, keeps its multiplier.
        """
        shown: dict[str, float] = {}
        for name, controller in self._controllers.items():
            value = metrics.get(f"term/{name}/value")
            if value is not None and f"term/{name}/skipped" not in metrics:
                figures = controller.observe(step, value)
                shown |= {f"term/{name}/{key}": figure for key, figure in figures.items()}
        return shown

    def state(self) -> TargetStates:
        """Return the states for resuming a run, as JSON data."""
        return {name: controller.state() for name, controller in self._controllers.items()}

    def restore(self, states: TargetStates) -> None:
        """Restore states; a target without a state is reset."""
        for name, controller in self._controllers.items():
            controller.restore(states.get(name))


def _clamp(number: float, lower: float, upper: float) -> float:
    """Clamp a number to bounds; NaN stays NaN."""
    return math.nan if math.isnan(number) else min(max(number, lower), upper)
