"""Terms, their registry, and terms bound into an objective."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from objectives.config.aliases import renamed_attribute
from objectives.errors import ObjectiveError, explain
from objectives.estimators import ESTIMATORS, EstimatorChoice, minimum_risk
from objectives.reductions import Reduction
from objectives.term_weights.schedule import WeightSchedule

if TYPE_CHECKING:
    from objectives.term_weights.targets import (
        TargetSpec,  # circular: targets -> json_schema -> term_lookup -> this module
    )

Kind = Literal["differentiable", "scored", "monitor"]
Unit = Literal["token", "sequence"]

__getattr__ = partial(renamed_attribute, __name__)  # keeps the names of release 0.1 importable
Need = Literal["ref_logprobs", "sampling_logprobs", "advantages", "values", "returns", "topk_logprobs", "hidden_states"]
Execution = Literal["task_runner", "inline", "async", "thread", "process"]
OnError = Literal["raise", "skip", "last"]


@dataclass(frozen=True, slots=True)
class Flag:
    """Part of a text to which a term objects.

    Attributes:
        start, end: its characters, ``text[start:end]``.
        reason: clause that says what is wrong with it.
    """

    start: int
    end: int
    reason: str


class Flagger(Protocol):
    """Function that finds the parts of one datum's text to which a term objects, for display.

    To receive a parameter of the term, it declares the parameter as a keyword-only argument. Terms with the estimator
    `unlikelihood` need no flagger, because their scores flag tokens.
    """

    def __call__(self, text: str, /, *_: Any, **params: Any) -> Sequence[Flag]: ...


@dataclass(frozen=True, slots=True)
class Term:
    """Function of a batch that is part of an objective; created by `regularizer` and callable like the function.

    Attributes:
        name: registered name.
        kind: ``"differentiable"``: the value is a differentiable function of the logprobs;
            ``"scored"``: the value is an external score, and an estimator provides the gradient;
            ``"monitor"``: metrics only.
        evaluate: ``(outputs, batch, **params) -> value`` or ``(value, metrics)``. The value is a tensor ``(N,)`` per
            token, ``(D,)`` per datum, or 0-d; a monitor may return only metrics. The value is minimized, so a higher
            score is worse.
        prepare: ``(batch, **params) -> features``, the part that needs the data only. It runs before the service's
            result is available, and once per datum if declared with `per_datum`. ``evaluate`` finds the features in
            ``batch.features``.
        reduction: reduction of the value to one number; see `objectives.reductions.reduce`. Scores per datum are
            reduced by their estimator instead.
        unit: number by which the gradient at one token is divided: ``"token"`` for the tokens of the batch, as in means
            over tokens, ``"sequence"`` for its datums, as in functions of a datum's summed logprobs; see
            `objectives.term_weights.scale`. The unit of a scored term is that of its estimator.
        estimator: gradient estimator of scores; ``"auto"`` for scores per datum, whose estimator depends on the data
            (`objectives.estimators.choose_estimator`); ``None`` for other kinds.
        params: model that validates the parameters: the keyword-only arguments of ``evaluate``, ``prepare``, ``flag``,
            ``metric_values`` and the estimator. Each function receives the parameters that it declares.
        needs: inputs beyond the current logprobs, such as ``ref_logprobs_DT`` of `Outputs` or ``advantages_DT`` of
            `Batch`.
        metric_values: metrics that a target can constrain: a function ``(outputs, batch, **params) -> value`` by the
            name of the metric, which is the reduced value.
        flag: finds the parts of a text to which the term objects; None if it cannot name them.
    """

    name: str
    kind: Kind
    evaluate: Callable[..., object]
    prepare: Callable[..., object] | None
    reduction: Reduction
    estimator: EstimatorChoice | None
    params: type[BaseModel]
    needs: tuple[Need, ...]
    unit: Unit = "token"
    metric_values: Mapping[str, Callable[..., object]] = field(default_factory=dict, hash=False)
    flag: Flagger | None = None

    def __call__(self, *args: object, **params: object) -> Any:
        return self.evaluate(*args, **params)


class NoParams(BaseModel):
    """Parameters of a term that has none, or whose parameters are already bound."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def regularizer(  # noqa: PLR0913 - a declaration, every option by keyword
    name: str,
    kind: Kind = "differentiable",
    *,
    prepare: Callable[..., object] | None = None,
    reduction: Reduction = "token_mean",
    estimator: EstimatorChoice = "auto",
    needs: tuple[Need, ...] = (),
    unit: Unit = "token",
    metric_values: Mapping[str, Callable[..., object]] | None = None,
    flag: Flagger | None = None,
) -> Callable[[Callable[..., object]], Term]:
    """Decorate a function as a `Term` and register it by name; the arguments are attributes of `Term`.

    Raises:
        ObjectiveError: an argument is unknown, another function has registered the name, or two functions of the term
            declare a parameter differently.

    >>> @regularizer("doctest_surprise")
    ... def surprise(outputs, batch, *, power: int = 2):
    ...     return outputs.logprobs_DT.abs() ** power
    >>> surprise.kind, check_params(surprise, {})
    ('differentiable', {'power': 2})
    """
    for option, value, allowed in (
        ("kind", kind, get_args(Kind)),
        ("reduction", reduction, get_args(Reduction)),
        ("estimator", estimator, get_args(EstimatorChoice)),
        ("unit", unit, get_args(Unit)),
        *(("need", need, get_args(Need)) for need in needs),
    ):
        if value not in allowed:
            raise ObjectiveError(f"Term {name!r} declares the {option} {value!r}; use one of {', '.join(allowed)}.")

    def decorate(evaluate: Callable[..., object]) -> Term:
        used_estimator = estimator if kind == "scored" else None
        values = dict(metric_values or {})
        optional = [function for function in (prepare, flag) if function]
        functions = (evaluate, *optional, *values.values(), *estimator_functions(used_estimator))
        params = _params_model(name, functions)
        term = Term(name, kind, evaluate, prepare, reduction, used_estimator, params, needs, unit, values, flag)
        return _register(term)

    return decorate


def check_params(term: Term, params: Mapping[str, object]) -> dict[str, object]:
    """Validate the parameters of a term and fill in the defaults.

    Raises:
        ObjectiveError: a parameter is unknown, missing or invalid.
    """
    try:
        return dict(term.params(**params))
    except ValidationError as error:
        known = ", ".join(term.params.model_fields) or "none"
        # The first two are the outputs and the batch.
        positional = [*inspect.signature(term.evaluate).parameters][2:]
        first = next((name for name in positional if name in params and name not in term.params.model_fields), "")
        fix = f"; write * before {first!r} in the function, as in (outputs, batch, *, {first})" if first else ""
        raise ObjectiveError(
            f"The parameters of term {term.name!r} are wrong: {explain(error)} (its parameters: {known}){fix}."
        ) from error


def estimator_functions(estimator: EstimatorChoice | None) -> tuple[Callable[..., object], ...]:
    """Return the estimators whose parameters a term accepts.

    ``"auto"`` stands for all estimators of scores per datum. Their only parameter is ``alpha``, as `minimum_risk`
    declares it.
    """
    if estimator is None:
        return ()
    return (minimum_risk,) if estimator == "auto" else (ESTIMATORS[estimator].function,)


def own_params(function: Callable[..., object], params: Mapping[str, object]) -> dict[str, object]:
    """Return the parameters that a function declares."""
    return {name: params[name] for name in _keyword_only(function)}


# Process-wide, because decorators fill it while modules are imported.
TERMS: dict[str, Term] = {}


def _register(term: Term) -> Term:
    registered = TERMS.get(term.name)
    # Running the same definition again, as in a notebook, replaces the term.
    if registered is not None and _origin(registered) != _origin(term):
        raise ObjectiveError(
            f"The term name {term.name!r} of {_origin(term)} is already registered by {_origin(registered)}; choose "
            "another name."
        )
    TERMS[term.name] = term
    return term


def _origin(term: Term) -> str:
    return origin_of(term.evaluate)


def definition_of(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function behind `functools.partial` and decorators, which has the name, source and annotations.

    >>> from functools import partial
    >>> definition_of(partial(partial(len)))
    <built-in function len>
    """
    while True:
        match function:
            case partial():
                function = function.func
            case object(__wrapped__=wrapped):
                function = wrapped
            case _:
                # An instance with a method `__call__` has no name and source of its own: take those of the method.
                return function if hasattr(function, "__qualname__") else type(function).__call__


def globals_of(function: Callable[..., object]) -> dict[str, Any]:
    """Return the names of the module that defines a function, in which its annotations are resolved."""
    return getattr(definition_of(function), "__globals__", {})


def origin_of(function: Callable[..., object]) -> str:
    """Return the import path of a function's definition, followed by the arguments of `functools.partial`.

    >>> from functools import partial
    >>> origin_of(partial(sorted, key=None))
    "builtins.sorted() {'key': None}"
    """
    definition = definition_of(function)
    bound = ""
    while isinstance(function, partial):
        bound += f"{function.args or '()'} {dict(sorted(function.keywords.items()))}"
        function = function.func
    return f"{definition.__module__}.{definition.__qualname__}{bound}"


def _keyword_only(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}


def _params_model(term: str, functions: Sequence[Callable[..., object]]) -> type[BaseModel]:
    """Create the model of a term's parameters: the keyword-only arguments of all its functions."""
    fields: dict[str, Any] = {}
    for function in functions:
        parameters = _keyword_only(function)
        # Resolve these annotations only: others may use names that are imported for type checkers alone.
        hints = {name: item.annotation for name, item in parameters.items() if item.annotation is not item.empty}
        annotations = get_type_hints(SimpleNamespace(__annotations__=hints), globals_of(function), include_extras=True)
        for name, parameter in parameters.items():
            default = ... if parameter.default is parameter.empty else parameter.default
            field = (annotations.get(name, Any), default)
            if fields.setdefault(name, field) != field:
                raise ObjectiveError(
                    f"Two functions of term {term!r} declare the parameter {name!r} with different types or "
                    "defaults; use the same declaration in both."
                )
    return create_model(f"{term}_params", __config__=ConfigDict(frozen=True, extra="forbid"), **fields)


F = TypeVar("F", bound=Callable[..., object])

_VERSION = "__tinker_flows_per_datum__"


def per_datum(version: int = 1) -> Callable[[F], F]:
    """Declare that ``prepare`` returns a list with one feature per datum.

    A feature may depend only on the datum's tokens, mask, text and text labels and on the parameters. A run then
    prepares each datum once and caches its feature as JSON, using the annotated return type of the function, such as
    ``list[Verdict]``.

    Args:
        version: increase it when a change in another module changes the features, to invalidate cached ones. Changes in
            the function's own module are detected.

    >>> @per_datum()
    ... def count_words(batch) -> list[int]:
    ...     return [len(text.split()) for text in batch.texts_D]
    >>> version_of(count_words), version_of(len)
    (1, None)
    """

    def declare(prepare: F) -> F:
        setattr(prepare, _VERSION, version)
        return prepare

    return declare


def version_of(prepare: Callable[..., object] | None) -> int | None:
    """Return the version of a ``prepare`` declared with `per_datum`; None for other functions."""
    return None if prepare is None else getattr(definition_of(prepare), _VERSION, getattr(prepare, _VERSION, None))


# Name of the base loss among the terms.
BASE = "base"


@dataclass(frozen=True, slots=True)
class Regularizer:
    """Term with its settings in an objective: a validated `RegularizerSpec`.

    Attributes:
        schedule: the configured weight; 0 for a term with a target.
        target: limit of the value, from which `Objective.weight_at` finds the weight.
        estimator: name of the estimator of a scored term, or ``"auto"`` while it depends on the data; ``None`` for
            other kinds.
        on_candidates: True if the term is evaluated on sampled candidates of the batch's prompts instead of the batch.
    """

    name: str
    term: Term
    schedule: WeightSchedule
    params: Mapping[str, object]
    every: int = 1
    retries: int = 0
    on_error: OnError = "raise"
    execution: Execution = "task_runner"
    timeout_s: float | None = None
    estimator: str | None = None
    on_candidates: bool = False
    target: TargetSpec | None = None

    @property
    def metric(self) -> str | None:
        """Metric that is trained instead of the value, because the target constrains it."""
        return self.target.metric if self.target else None

    @property
    def adds_up(self) -> bool:
        """True if the value of a batch is the sum of the values of its parts.

        The estimators of scores per datum return means, whatever the reduction.
        """
        if self.term.kind == "scored" and not (self.estimator in ESTIMATORS and ESTIMATORS[self.estimator].per_token):
            return False
        return self.term.reduction == "sum" or getattr(self.term.evaluate, "adds_up", False)

    def weight_at(self, step: int, num_steps: int) -> float:
        """Return the configured weight at a step; 0 for a monitor and for a term with a target."""
        return 0.0 if self.term.kind == "monitor" else self.schedule.weight_at(step, num_steps)

    def due_at(self, step: int) -> bool:
        return step % self.every == 0
