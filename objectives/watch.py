"""What the terms of a run do over many steps: smoothed shares, and warnings of what lasts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from objectives.collapse import FIGURES, collapses
from objectives.regularizer import BASE
from objectives.spec import WatchSpec


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that lasted.

    Attributes:
        kind: what it is.
        terms: the one that dominates or collapses, or the two that conflict.
        step: the last one at which it was so.
        figure: the share of the gradient, or the cosine, of that step; the average of what a collapse shows in.
        text: one sentence for the user.
    """

    kind: Literal["dominance", "conflict", "explosion", "chance", "length"]
    terms: tuple[str, ...]
    step: int
    figure: float
    text: str

    @property
    def key(self) -> str:
        """``dominance.<term>``, ``conflict.<term>.<term>`` or ``<kind>.<term>``."""
        return ".".join([self.kind, *self.terms])


class Watch:
    """Looks at the metrics of each step, in order, and remembers what a warning needs.

    - Dominance: a term's share of the gradient is above a threshold. The base loss may have any share.
    - Conflict: the cosine of two gradients, the base loss's among them, is below a threshold.
    - Collapse of a preference loss: its margin explodes, its accuracy stays at chance, its rewards go with the lengths.

    Each is warned of when it has lasted for `patience` steps at which it was evaluated, and again only after it ended.
    """

    def __init__(self, spec: WatchSpec) -> None:
        self._spec = spec
        self._smoothed: dict[str, float] = {}
        self._lasting: dict[str, int] = {}
        self._warnings: list[Warned] = []

    def look(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """``term/<name>/grad_share_ema``, exponential moving averages, from the metrics of a step."""
        made: dict[str, float] = {}
        for key, figure in metrics.items():
            match key.split("/"):
                case ["term", name, "grad_share"]:
                    made[f"term/{name}/grad_share_ema"] = self._smooth(name, figure)
                    if name != BASE:
                        self._dominance(name, figure, step)
                case ["term", name, "cosine_to_base"] if name != BASE:
                    self._conflict(BASE, name, figure, step)
                case ["cosine", first, second]:
                    self._conflict(first, second, figure, step)
                case ["term", name, "length_correlation"]:
                    figures = {each: metrics.get(f"term/{name}/{each}") for each in FIGURES}
                    self._collapse(name, {key: figure for key, figure in figures.items() if figure is not None}, step)
        return made

    def take_warnings(self) -> list[Warned]:
        """The warnings since the last time."""
        taken, self._warnings = self._warnings, []
        return taken

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on with, as plain data."""
        return {"smoothed": dict(self._smoothed), "lasting": dict(self._lasting)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; an empty one is the beginning."""
        self._smoothed = dict(state.get("smoothed", {}))
        self._lasting = dict(state.get("lasting", {}))
        self._warnings = []

    def _dominance(self, name: str, share: float, step: int) -> None:
        if self._lasts(f"dominance.{name}", share > self._spec.dominance_above):
            said = f"Term {name!r} has had more than {self._spec.dominance_above:.0%} of the gradient"
            text = f"{said} for {self._lasted(step)}: lower its weight."
            self._warnings.append(Warned("dominance", (name,), step, share, text))

    def _conflict(self, first: str, second: str, cosine: float, step: int) -> None:
        if self._lasts(f"conflict.{first}.{second}", cosine < self._spec.conflict_below):
            said = f"The gradients of {first!r} and {second!r} have pulled against each other (cosine {cosine:.2f})"
            remedy = "lower the weight of one, or balance them by pcgrad"
            text = f"{said} for {self._lasted(step)}: {remedy}."
            self._warnings.append(Warned("conflict", (first, second), step, cosine, text))

    def _collapse(self, name: str, figures: Mapping[str, float], step: int) -> None:
        if len(figures) < len(FIGURES):
            return  # somebody else's term, which calls one of its metrics so
        for each in collapses(name, {key: self._smooth(f"{name}/{key}", figure) for key, figure in figures.items()}):
            if self._lasts(f"{each.kind}.{name}", each.happens, each.patience):
                text = f"{each.said} for {self._lasted(step, each.patience)}: {each.remedy}."
                self._warnings.append(Warned(each.kind, (name,), step, each.figure, text))

    def _smooth(self, key: str, figure: float) -> float:
        """The moving average of a figure with its value at this step."""
        decay = self._spec.share_decay
        self._smoothed[key] = decay * self._smoothed.get(key, figure) + (1 - decay) * figure
        return self._smoothed[key]

    def _lasts(self, key: str, happens: bool, patience: int = 1) -> bool:
        """True once, when it has happened often enough on end."""
        if not happens:
            self._lasting.pop(key, None)
            return False
        self._lasting[key] = self._lasting.get(key, 0) + 1
        return self._lasting[key] == patience * self._spec.patience

    def _lasted(self, step: int, patience: int = 1) -> str:
        return f"{patience * self._spec.patience} steps on end, up to step {step}"
