"""The contract of a regularizer, and the register of those that have a name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from objectives.errors import ObjectiveError, explain
from objectives.estimators import ESTIMATORS
from objectives.reductions import Reduction

Kind = Literal["differentiable", "scored", "monitor"]
Estimator = Literal["minimum_risk", "score_function", "unlikelihood"]
Need = Literal["ref_logprobs", "sampling_logprobs", "advantages", "values", "returns", "topk_logprobs", "hidden_states"]


@dataclass(frozen=True, slots=True)
class Term:
    """A function of a batch that takes part in an objective; made by `regularizer`, called like the function.

    Attributes:
        name: what it is registered as.
        kind: ``"differentiable"``: its value is a function of the logprobs that autograd can follow;
            ``"scored"``: its value is a score from outside, which ``estimator`` turns into a gradient;
            ``"monitor"``: metrics only.
        evaluate: ``(outputs, batch, **params) -> value`` or ``(value, metrics)``. The value is a tensor of
            ``(N,)`` per token, ``(D,)`` per datum, or 0-d; a monitor may return its metrics alone. It is
            minimised, so a higher score is a worse one.
        prepare: ``(batch, **params) -> features``, what needs the data only; runs ahead of the service, and once for
            each datum where it is declared so (`objectives.per_datum`).
        reduction: how the value becomes one number, see `objectives.reductions.reduce`.
        estimator: how scores become a gradient, see `objectives.estimators`; ``None`` unless scored.
        params: the model that checks the parameters, read off the keyword-only arguments of ``evaluate``,
            ``prepare`` and the estimator; each of them is given those it names.
        needs: what it reads beyond the current logprobs, such as the ``ref_logprobs_DT`` of `Outputs` or the
            ``advantages_DT`` of `Batch`.
    """

    name: str
    kind: Kind
    evaluate: Callable[..., Any]
    prepare: Callable[..., Any] | None
    reduction: Reduction
    estimator: Estimator | None
    params: type[BaseModel]
    needs: tuple[Need, ...]

    def __call__(self, *args: Any, **params: Any) -> Any:
        return self.evaluate(*args, **params)


class NoParams(BaseModel):
    """The parameters of a term that takes none, or has them already."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def regularizer(
    name: str,
    kind: Kind = "differentiable",
    *,
    prepare: Callable[..., Any] | None = None,
    reduction: Reduction = "token_mean",
    estimator: Estimator = "minimum_risk",
    needs: tuple[Need, ...] = (),
) -> Callable[[Callable[..., Any]], Term]:
    """Make a function a `Term` and register it, so that an objective can name it.

    >>> @regularizer("doctest_surprise")
    ... def surprise(outputs, batch, *, power: int = 2):
    ...     return outputs.logprobs_DT.abs() ** power
    >>> surprise.kind, check_params(surprise, {})
    ('differentiable', {'power': 2})
    """
    for what, given, known in (
        ("kind", kind, get_args(Kind)),
        ("reduction", reduction, get_args(Reduction)),
        ("estimator", estimator, get_args(Estimator)),
        *(("need", need, get_args(Need)) for need in needs),
    ):
        if given not in known:
            raise ObjectiveError(f"Term {name!r} declares the {what} {given!r}: name one of {', '.join(known)}.")

    def decorate(evaluate: Callable[..., Any]) -> Term:
        used = estimator if kind == "scored" else None
        parts = (evaluate, prepare, ESTIMATORS[used] if used else None)
        params = _params_model(name, [part for part in parts if part])
        term = Term(name, kind, evaluate, prepare, reduction, used, params, needs)
        return _register(term)

    return decorate


def check_params(term: Term, params: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters of a term, checked and with their defaults."""
    try:
        return dict(term.params(**params))
    except ValidationError as error:
        known = ", ".join(term.params.model_fields) or "none"
        raise ObjectiveError(
            f"The parameters of term {term.name!r} are wrong: {explain(error)} (its parameters: {known})."
        ) from error


def own_params(part: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a term's parameters that one of its functions names."""
    return {name: params[name] for name in _keyword_only(part)}


TERMS: dict[str, Term] = {}


def _register(term: Term) -> Term:
    other = TERMS.get(term.name)
    # The same definition run again, as a notebook does, replaces itself.
    if other is not None and _origin(other) != _origin(term):
        raise ObjectiveError(
            f"Term {term.name!r} of {_origin(term)} is already registered by {_origin(other)}: give it another name."
        )
    TERMS[term.name] = term
    return term


def _origin(term: Term) -> str:
    return f"{term.evaluate.__module__}.{term.evaluate.__qualname__}"


def _keyword_only(part: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(part).parameters
    return {name: each for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}


def _params_model(term: str, parts: Sequence[Callable[..., Any]]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for part in parts:
        parameters = _keyword_only(part)
        # Only these: a positional one may be annotated with what is imported for type checkers alone.
        written = {name: each.annotation for name, each in parameters.items() if each.annotation is not each.empty}
        annotations = get_type_hints(
            SimpleNamespace(__annotations__=written), inspect.unwrap(part).__globals__, include_extras=True
        )
        for name, each in parameters.items():
            default = ... if each.default is each.empty else each.default
            field = (annotations.get(name, Any), default)
            if fields.setdefault(name, field) != field:
                raise ObjectiveError(
                    f"Two functions of term {term!r} declare the parameter {name!r} with different types or "
                    "defaults: declare it the same in both."
                )
    return create_model(f"{term}_params", __config__=ConfigDict(frozen=True, extra="forbid"), **fields)
