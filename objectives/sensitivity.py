"""What another weight of one term would do to the gradient of a step, all other weights as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from objectives.regularizer import BASE


@dataclass(frozen=True, slots=True)
class Gradients:
    """The weighted gradients of a step, as far as their lengths and angles go.

    Attributes:
        names: the terms, the base loss among them.
        weighted_norms: weight times norm of each gradient.
        cosines: of each two gradients.
    """

    names: Sequence[str]
    weighted_norms: Sequence[float]
    cosines: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Response:
    """The gradient with the weight of one term times a factor.

    Attributes:
        share: of that term, in [0, 1].
        cosine_to_base: of the whole gradient, in [-1, 1]; 0 where one of them is zero.
        norm: of the whole gradient, over what it is with the weight as it is.
    """

    share: float
    cosine_to_base: float
    norm: float


def respond(gradients: Gradients, name: str, factor: float) -> Response:
    """How the gradient of a step responds to a term's weight times a factor.

    >>> right_angle = Gradients(("base", "a"), (3.0, 4.0), ((1.0, 0.0), (0.0, 1.0)))
    >>> respond(right_angle, "a", 1.0), respond(right_angle, "a", 0.0).cosine_to_base
    (Response(share=0.5714285714285714, cosine_to_base=0.6, norm=1.0), 1.0)
    """
    term, base = gradients.names.index(name), gradients.names.index(BASE)
    before = list(gradients.weighted_norms)
    norms = [norm * factor if k == term else norm for k, norm in enumerate(before)]
    whole = _norm(gradients, norms)
    along = sum(norm * gradients.cosines[base][k] for k, norm in enumerate(norms))
    return Response(
        share=_ratio(norms[term], sum(norms)),
        cosine_to_base=max(-1.0, min(1.0, _ratio(along, whole))) if norms[base] else 0.0,
        norm=_ratio(whole, _norm(gradients, before)),
    )


def factor_of_half(gradients: Gradients, name: str) -> float:
    """The factor on a term's weight that gives it half of the gradient: infinite for one that has none."""
    term = gradients.names.index(name)
    others = sum(norm for k, norm in enumerate(gradients.weighted_norms) if k != term)
    return others / gradients.weighted_norms[term] if gradients.weighted_norms[term] else math.inf


def _norm(gradients: Gradients, norms: Sequence[float]) -> float:
    square = sum(a * b * gradients.cosines[i][j] for i, a in enumerate(norms) for j, b in enumerate(norms))
    return math.sqrt(max(0.0, square))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
