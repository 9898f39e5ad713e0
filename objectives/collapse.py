"""How learning from preferences goes wrong, as the rewards of a preference loss show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# What every preference loss says of a batch (`objectives.terms.preferences`).
FIGURES = ("accuracy", "margin", "length_correlation")
# Of the sigmoid, whose gradient is 3e-7 there.
_MARGIN_ABOVE = 15.0
_CHANCE_BELOW = 0.55
_CORRELATION_ABOVE = 0.9
# Small batches are at chance by chance, and a slow start is none.
_CHANCE_PATIENCE = 5


@dataclass(frozen=True, slots=True)
class Collapse:
    """One way to go wrong.

    Attributes:
        kind: which one.
        happens: whether it does, by averages over the last steps.
        figure: what it is judged by.
        patience: how many times the usual number of steps it lasts before it is warned of.
        said, remedy: in words, around how long it has lasted.
    """

    kind: Literal["explosion", "chance", "length"]
    happens: bool
    figure: float
    patience: int
    said: str
    remedy: str


def collapses(name: str, smoothed: Mapping[str, float]) -> list[Collapse]:
    """Every way to go wrong, and whether a term does.

    Args:
        name: of the term.
        smoothed: its `FIGURES`, averaged over the last steps.

    >>> figures = {"accuracy": 1.0, "margin": 21.0, "length_correlation": 0.1}
    >>> [each.kind for each in collapses("base", figures) if each.happens]
    ['explosion']
    """
    accuracy, margin, correlation = (smoothed[each] for each in FIGURES)
    return [
        Collapse(
            "explosion",
            margin > _MARGIN_ABOVE,
            margin,
            1,
            f"The margin of {name!r} has been above {_MARGIN_ABOVE:g} ({margin:.1f})",
            "the policy is far from where it started and has nothing left to learn from these pairs, so lower the "
            "learning rate, raise beta, or train for fewer steps",
        ),
        Collapse(
            "chance",
            accuracy < _CHANCE_BELOW,
            accuracy,
            _CHANCE_PATIENCE,
            f"The accuracy of {name!r} has been at chance ({accuracy:.2f})",
            "raise the learning rate, lower beta, or look whether the pairs say which answer is the better one",
        ),
        Collapse(
            "length",
            abs(correlation) > _CORRELATION_ABOVE,
            correlation,
            1,
            f"The rewards of {name!r} have gone with the lengths of the answers (correlation {correlation:.2f})",
            "lower the learning rate or raise beta, balance the lengths of the pairs, or take simpo, whose reward is "
            "per token",
        ),
    ]
