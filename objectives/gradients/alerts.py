"""Monitoring of terms over many steps: smoothed gradient shares and warnings about persistent problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

from objectives.config.spec import WatchSpec
from objectives.term import BASE

# A conflict of two terms with smaller shares of the gradient than this changes next to nothing.
_MIN_SHARE = 0.05
# Gradients that have no token in common have a cosine of 0 up to rounding.
_ROUNDING = 0.005


class WatchState(TypedDict, total=False):
    """State of a `Watch` for resuming a run, as JSON data.

    Attributes:
        smoothed: moving average of each monitored metric.
        lasting: number of consecutive evaluations with each problem.
    """

    smoothed: dict[str, float]
    lasting: dict[str, int]


@dataclass(frozen=True, slots=True)
class TermWarning:
    """Warning about a problem that persisted over several steps.

    Attributes:
        kind: the problem.
        terms: the term that dominates, is idle, gets worse, collapses or misses its target; or the two terms in
            conflict.
        step: last step of the period.
        figure: gradient share, effect, cosine or violation at this step, or the smoothed metric that shows a collapse;
            the smoothed share for a term that was idle in a whole short run.
        text: one sentence for the user.
    """

    kind: Literal["dominance", "idle", "adverse", "conflict", "target", "explosion", "chance", "length"]
    terms: tuple[str, ...]
    step: int
    figure: float
    text: str

    @property
    def key(self) -> str:
        """``<kind>.<term>``; for a conflict ``conflict.<term>.<term>``."""
        return ".".join([self.kind, *self.terms])


class Watch:
    """Monitor of the metrics of consecutive steps.

    - Dominance: a term's share of the gradient is above a threshold. The base loss is exempt.
    - Idle: a weighted term has no gradient, or a term that scores whole datums and has no target has almost no share of
      the total gradient. The base loss is exempt.
    - Adverse: the updates raise the value of a weighted term, although it is minimized (``term/<name>/effect`` is
      positive). The base loss is exempt, and so are terms with a target, whose values may rise up to it.
    - Target: a term misses its target although its multiplier is at its bound.
    - Conflict: the cosine of two gradients, including the base loss's, is below a threshold, and both have at least 5 %
      of the gradient: a smaller share hardly changes the update. Terms of weight 0 are exempt. So are terms with a
      target, whose multiplier is above 0 only because they work against another term.
    - Collapse of a preference loss: its margin explodes, its accuracy stays at chance, or its rewards correlate with
      the lengths of completions.

    A problem causes one warning after it persists for `patience` consecutive evaluations of the term, and again only
    after it has disappeared and returned. Accuracy at chance needs five times as many evaluations. In a run that is
    shorter than `patience`, but has three steps, a term that was idle in every step is reported at the end.

    Attributes:
        effect_every: steps between measurements of the effects of updates; 0 for none.
    """

    def __init__(self, spec: WatchSpec) -> None:
        self._spec, self.effect_every = spec, spec.effect_every
        self._smoothed: dict[str, float] = {}
        self._durations: dict[str, int] = {}
        self._warnings: list[TermWarning] = []

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Record the metrics of a step; return the moving averages ``term/<name>/grad_share_ema``."""
        averages: dict[str, float] = {}
        for key, figure in metrics.items():
            match key.split("/"):
                case ["term", name, "at_bound"]:
                    self._check_target(name, figure == 1, metrics[f"term/{name}/violation"], step)
                case ["term", name, "grad_share"]:
                    averages[f"term/{name}/grad_share_ema"] = self._smooth(name, figure)
                    if name != BASE:
                        self._check_dominance(name, figure, metrics, step)
                        self._check_idle(name, figure, metrics, step)
                case ["term", name, "effect"] if name != BASE:
                    self._check_adverse(name, figure, metrics, step)
                case ["term", name, "cosine_to_base"] if name != BASE:
                    self._check_conflict(BASE, name, figure, metrics, step)
                case ["cosine", first, second]:
                    self._check_conflict(first, second, figure, metrics, step)
                case ["term", name, "length_correlation"]:
                    values = {key: metrics.get(f"term/{name}/{key}") for key in PREFERENCE_METRICS}
                    self._check_collapse(name, {key: v for key, v in values.items() if v is not None}, step)
        return averages

    def end(self, num_steps: int) -> None:
        """Warn of terms that were idle in every step of a run that has `_MIN_STEPS` to ``patience - 1`` steps."""
        if not _MIN_STEPS <= num_steps < self._spec.patience:
            return
        for key, duration in self._durations.items():
            kind, _, name = key.partition(".")
            if kind == "idle" and duration == num_steps:
                text = (
                    f"Term {name!r} has trained next to nothing in each of the {num_steps} steps; check what it "
                    "scores, and whether its values differ between completions or are all within its limits."
                )
                self._warnings.append(TermWarning("idle", (name,), num_steps - 1, self._smoothed[name], text))

    def pop_warnings(self) -> list[TermWarning]:
        """Return the warnings since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def state(self) -> WatchState:
        """Return the state for resuming a run."""
        return {"smoothed": dict(self._smoothed), "lasting": dict(self._durations)}

    def restore(self, state: WatchState) -> None:
        """Restore a state; an empty state resets."""
        self._smoothed = dict(state.get("smoothed", {}))
        self._durations = dict(state.get("lasting", {}))
        self._warnings = []

    def _check_dominance(self, name: str, share: float, metrics: Mapping[str, float], step: int) -> None:
        if self._persists(f"dominance.{name}", share > self._spec.dominance_above):
            problem = f"Term {name!r} has had more than {self._spec.dominance_above:.0%} of the gradient"
            fix = "relax its target" if _has_target(name, metrics) else "lower its weight"
            text = f"{problem} for {self._duration(step)}; {fix}."
            self._warnings.append(TermWarning("dominance", (name,), step, share, text))

    def _check_idle(self, name: str, share: float, metrics: Mapping[str, float], step: int) -> None:
        """Check a weighted term; a small share is normal for a target that is easy to meet."""
        if metrics.get(f"term/{name}/weight", 0.0) == 0:
            return
        trained_prompts = metrics.get(f"term/{name}/trained_prompts")  # None if no datum has a score
        is_small = share < self._spec.idle_below and not _has_target(name, metrics)
        is_idle = share == 0 or (trained_prompts is not None and is_small)
        if not self._persists(f"idle.{name}", is_idle):
            return
        if trained_prompts == 0:
            reason = "its scores do not differ between the completions of a prompt"
            fix = "check what it scores, or provide more completions of each prompt"
        elif share == 0:
            reason = "its gradient is zero"
            fix = "check that its values are not all within its limits, or remove it"
        else:
            reason = f"its share of the gradient is {share:.1g}"
            fix = "raise its weight, or lower alpha if it is estimated by minimum_risk"
        text = f"Term {name!r} has trained next to nothing for {self._duration(step)}, because {reason}; {fix}."
        self._warnings.append(TermWarning("idle", (name,), step, share, text))

    def _check_adverse(self, name: str, effect: float, metrics: Mapping[str, float], step: int) -> None:
        if metrics.get(f"term/{name}/weight", 0.0) <= 0 or _has_target(name, metrics):
            return
        if self._persists(f"adverse.{name}", effect > 0):
            problem = f"The updates have made term {name!r} worse"
            fix = "raise its weight, or lower the weights of the terms that conflict with it"
            text = f"{problem} in {self._spec.patience} consecutive measurements, up to step {step}; {fix}."
            self._warnings.append(TermWarning("adverse", (name,), step, effect, text))

    def _check_target(self, name: str, is_stuck: bool, violation: float, step: int) -> None:
        if self._persists(f"target.{name}", is_stuck):
            problem = f"Term {name!r} has missed its target by {abs(violation):.3g}"
            fix = "relax the target, or widen the multiplier's bounds"
            text = f"{problem} for {self._duration(step)}, with its multiplier at the bound; {fix}."
            self._warnings.append(TermWarning("target", (name,), step, violation, text))

    def _check_conflict(self, first: str, second: str, cosine: float, metrics: Mapping[str, float], step: int) -> None:
        if any(_has_target(name, metrics) or metrics.get(f"term/{name}/weight") == 0 for name in (first, second)):
            return
        share = min(metrics.get(f"term/{name}/grad_share", 1.0) for name in (first, second))
        is_conflict = cosine < self._spec.conflict_below and abs(cosine) >= _ROUNDING and share >= _MIN_SHARE
        if self._persists(f"conflict.{first}.{second}", is_conflict):
            problem = f"The gradients of {first!r} and {second!r} have been in conflict (cosine {cosine:.2f})"
            fix = "lower one of the weights, or set balance to dualproj"
            text = f"{problem} for {self._duration(step)}; {fix}."
            self._warnings.append(TermWarning("conflict", (first, second), step, cosine, text))

    def _check_collapse(self, name: str, metrics: Mapping[str, float], step: int) -> None:
        if len(metrics) < len(PREFERENCE_METRICS):
            return  # This is not a preference loss, but a user's term that has a metric of the same name.
        smoothed = {key: self._smooth(f"{name}/{key}", value) for key, value in metrics.items()}
        for check in check_collapses(name, smoothed):
            if self._persists(f"{check.kind}.{name}", check.detected, check.patience_factor):
                text = f"{check.problem} for {self._duration(step, check.patience_factor)}; {check.fix}."
                self._warnings.append(TermWarning(check.kind, (name,), step, check.figure, text))

    def _smooth(self, key: str, figure: float) -> float:
        decay = self._spec.share_decay
        self._smoothed[key] = decay * self._smoothed.get(key, figure) + (1 - decay) * figure
        return self._smoothed[key]

    def _persists(self, key: str, detected: bool, patience_factor: int = 1) -> bool:
        """Count consecutive detections; return True once, when there are `patience_factor` times `patience`."""
        if not detected:
            self._durations.pop(key, None)
            return False
        self._durations[key] = self._durations.get(key, 0) + 1
        return self._durations[key] == patience_factor * self._spec.patience

    def _duration(self, step: int, patience_factor: int = 1) -> str:
        return f"{patience_factor * self._spec.patience} consecutive evaluations, up to step {step}"


def _has_target(name: str, metrics: Mapping[str, float]) -> bool:
    """Check whether a controller sets the weight of a term."""
    return f"term/{name}/multiplier" in metrics


# Metrics of every preference loss (`objectives.terms.group.preferences`).
PREFERENCE_METRICS = ("accuracy", "margin", "length_correlation")

# A run of fewer steps is a trial, in which an idle term says little.
_MIN_STEPS = 3
# The gradient of the sigmoid at this margin is 3e-7.
_MAX_MARGIN = 15.0
_MIN_ACCURACY = 0.55
_MAX_CORRELATION = 0.9
# Small batches are often at chance, and a slow start is not a collapse.
_CHANCE_PATIENCE = 5


@dataclass(frozen=True, slots=True)
class CollapseCheck:
    """Check for one kind of collapse of a preference loss.

    Attributes:
        kind: kind of collapse.
        detected: result of the check on smoothed metrics.
        figure: the smoothed metric.
        patience_factor: multiple of `patience` before a warning.
        problem, fix: text before and after the duration in the warning.
    """

    kind: Literal["explosion", "chance", "length"]
    detected: bool
    figure: float
    patience_factor: int
    problem: str
    fix: str


def check_collapses(name: str, smoothed: Mapping[str, float]) -> list[CollapseCheck]:
    """Check a preference loss for collapses; return one check for each kind, whether or not it detected one.

    Args:
        name: name of the term.
        smoothed: its `PREFERENCE_METRICS`, smoothed over the last steps.

    >>> metrics = {"accuracy": 1.0, "margin": 21.0, "length_correlation": 0.1}
    >>> [check.kind for check in check_collapses("base", metrics) if check.detected]
    ['explosion']
    """
    accuracy, margin, correlation = (smoothed[key] for key in PREFERENCE_METRICS)
    return [
        CollapseCheck(
            "explosion",
            margin > _MAX_MARGIN,
            margin,
            1,
            f"The margin of {name!r} has been above {_MAX_MARGIN:g} ({margin:.1f})",
            "the policy is far from its start and these pairs have no gradient left, so lower the learning rate, raise "
            "beta, or train for fewer steps",
        ),
        CollapseCheck(
            "chance",
            accuracy < _MIN_ACCURACY,
            accuracy,
            _CHANCE_PATIENCE,
            f"The accuracy of {name!r} has been at chance ({accuracy:.2f})",
            "raise the learning rate, lower beta, or check that the pairs label the better completion",
        ),
        CollapseCheck(
            "length",
            abs(correlation) > _MAX_CORRELATION,
            correlation,
            1,
            f"The rewards of {name!r} have followed the lengths of completions (correlation {correlation:.2f})",
            "lower the learning rate or raise beta, balance the lengths of the pairs, or use simpo, which has a reward "
            "per token",
        ),
    ]
