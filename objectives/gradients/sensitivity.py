"""Sensitivity of the gradient of a step to the weight of one term."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from objectives.term import BASE


@dataclass(frozen=True, slots=True)
class Gradients:
    """Norms and angles of the weighted gradients of a step.

    Attributes:
        names: the terms, including the base loss.
        weighted_norms: norm of each weighted gradient, never negative.
        cosines: cosine of each pair of weighted gradients; a negative weight turns its gradient around.
    """

    names: Sequence[str]
    weighted_norms: Sequence[float]
    cosines: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Response:
    """Total gradient with the weight of one term multiplied by a factor.

    Attributes:
        share: gradient share of this term, in [0, 1]; 0 if all gradients are zero.
        cosine_to_base: cosine of the total gradient and the base loss's, in [-1, 1]; 0 if one of them is zero.
        norm: norm of the total gradient, divided by the norm for factor 1; 0 if the latter is 0.
    """

    share: float
    cosine_to_base: float
    norm: float


def respond(gradients: Gradients, name: str, factor: float) -> Response:
    """Compute the total gradient for a term's weight multiplied by a factor.

    >>> right_angle = Gradients(("base", "a"), (3.0, 4.0), ((1.0, 0.0), (0.0, 1.0)))
    >>> respond(right_angle, "a", 1.0), respond(right_angle, "a", 0.0).cosine_to_base
    (Response(share=0.5714285714285714, cosine_to_base=0.6, norm=1.0), 1.0)
    """
    term, base = gradients.names.index(name), gradients.names.index(BASE)
    current_norms = list(gradients.weighted_norms)
    norms = [norm * factor if k == term else norm for k, norm in enumerate(current_norms)]
    total_norm = _norm(gradients, norms)
    projection = sum(norm * gradients.cosines[base][k] for k, norm in enumerate(norms))
    return Response(
        share=_ratio(norms[term], sum(norms)),
        cosine_to_base=max(-1.0, min(1.0, _ratio(projection, total_norm))) if norms[base] else 0.0,
        norm=_ratio(total_norm, _norm(gradients, current_norms)),
    )


def factor_of_half(gradients: Gradients, name: str) -> float:
    """Factor on a term's weight for a gradient share of one half; infinite for a term without gradient."""
    term = gradients.names.index(name)
    others = sum(norm for k, norm in enumerate(gradients.weighted_norms) if k != term)
    return others / gradients.weighted_norms[term] if gradients.weighted_norms[term] else math.inf


def _norm(gradients: Gradients, norms: Sequence[float]) -> float:
    square = sum(a * b * gradients.cosines[i][j] for i, a in enumerate(norms) for j, b in enumerate(norms))
    return math.sqrt(max(0.0, square))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
