"""A base loss and weighted terms, bound and checked before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from objectives.balance import Balance, make_balance
from objectives.base_loss import policy_loss_term
from objectives.batch import TOPK, Batch, Outputs
from objectives.errors import ExecutionError, ObjectiveError, explain
from objectives.estimators import fixed_data_refusal
from objectives.execution.cluster import library
from objectives.execution.process import importable
from objectives.execution.runner import PLACES, TermRunner
from objectives.find_term import allowed_modules, find_term, registered_terms
from objectives.losses import BASE_LOSSES, find_base_loss
from objectives.regularizer import BASE, Regularizer
from objectives.schedule import Constant, WeightSchedule
from objectives.sdk import sdk_term
from objectives.spec import Backend, BalanceSpec, BaseLossSpec, ObjectiveSpec, RegularizerSpec, WatchSpec
from objectives.term import Need, Term, check_params
from objectives.watch import Watch

CROSS_ENTROPY = "cross_entropy"


class Objective:
    """``total = base + sum_i weight_i * term_i``.

    Args:
        base_loss: the name of a loss, such as ``"cross_entropy"`` or ``"ppo"``, or of a term, such as ``"dpo"``; a
            `BaseLossSpec` or its fields as a dict, ``{"name": "ppo", "params": {...}}``; a `Term`; or any callable
            of the SDK's ``CustomLossFnV1`` shape, ``(data, logprobs) -> (loss, metrics)``.
        regularizers: a `RegularizerSpec` each, or its fields as a dict. In a dict ``fn`` may also be a
            `Term`, whose name is then the default, or a callable of the SDK's shape.
        modules: what an ``fn`` that is an import path may lead to; everywhere, unless given.
        balance: a rule that changes the weights at each step, such as `PCGradSpec`.
        watch: what is warned of, and after how long.
        backend: whether a step is one pass of the service, see `objectives.one_pass`.

    Its terms are run by its `runner`. With one of execution ``process``, ``dask`` or ``ray``, use it as a context
    manager (or call ``runner.close()``), so that the processes end with it.

    Raises:
        ObjectiveError: for whatever is wrong with any of them, before anything runs.

    >>> objective = Objective(regularizers=[{"name": "confidence", "weight": 0.1}])
    >>> [(each.name, each.weight_at(step=0, num_steps=10)) for each in objective.regularizers]
    [('confidence', 0.1)]
    """

    __slots__ = ("backend", "balance", "base", "passes", "regularizers", "runner", "watch")

    base: Regularizer | None
    """The base loss as a term of weight 1; ``None`` for cross_entropy, whose gradient needs no autograd."""
    regularizers: tuple[Regularizer, ...]
    """The enabled terms, in the order given."""
    runner: TermRunner
    """What evaluates them where their specs say."""
    balance: Balance | None
    """What gives them other weights, step by step."""
    watch: Watch
    """What remembers the steps before and warns of what lasts."""
    backend: Backend
    """Which way its steps may go."""
    passes: int | None
    """Which way they went so far: one pass of the service, or two; ``None`` before the first."""

    def __init__(
        self,
        base_loss: str | BaseLossSpec | Mapping[str, Any] | Term | Callable[..., Any] = CROSS_ENTROPY,
        regularizers: Iterable[RegularizerSpec | Mapping[str, Any]] = (),
        modules: Collection[str] | None = None,
        balance: BalanceSpec | None = None,
        watch: WatchSpec | None = None,
        backend: Backend = "auto",
    ) -> None:
        self.base = _bind_base(base_loss)
        bound = [_bind(each, modules) for each in regularizers]
        seen = {BASE}
        for each, _ in bound:
            if each.name in seen:
                taken = "is kept for the base loss" if each.name == BASE else "is used twice"
                raise ObjectiveError(f"The name {each.name!r} of a regularizer {taken}: give each its own `name`.")
            seen.add(each.name)
        self.regularizers = tuple(each for each, enabled in bound if enabled)
        self.runner = TermRunner()
        self.balance = make_balance(balance)
        self.watch = Watch(watch or WatchSpec())
        self.backend, self.passes = backend, None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.runner.close()

    @classmethod
    def from_spec(cls, spec: ObjectiveSpec) -> Objective:
        """The objective that plain data describes; its import paths lead only where `allowed_modules` says."""
        return cls(spec.base_loss, spec.regularizers, allowed_modules(), spec.balance, spec.watch, spec.backend)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on with, as plain data."""
        balance = self.balance.state() if self.balance else {}
        return {"watch": self.watch.state(), "balance": balance, "passes": self.passes, "last": self.runner.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; an empty one is the beginning."""
        self.watch.restore(state.get("watch", {}))
        self.runner.restore(state.get("last", {}))
        if self.balance:
            self.balance.restore(state.get("balance", {}))
        # A run of a release that knew two passes only goes on with two.
        self.passes = state.get("passes", 2 if state else None)

    def needs(self, need: Need) -> bool:
        """Whether the base loss or an enabled term reads it."""
        return any(need in each.term.needs for each in (*([self.base] if self.base else []), *self.regularizers))

    def check_needs(self, given: Collection[str] = ()) -> None:
        """Refuse, before the run, the terms that need what a flow does not give them.

        Args:
            given: what the flow fills in beside the current logprobs: ``"ref_logprobs"``,
                ``"sampling_logprobs"``, ``"advantages"``.
        """
        for each in (*([self.base] if self.base else []), *self.regularizers):
            if each.term.estimator == "score_function" and "sampling_logprobs" not in given:
                raise ObjectiveError(f"Term {each.name!r} cannot run here: {fixed_data_refusal()}.")
            for need in each.term.needs:
                if need not in given:
                    remedy = "take another base loss" if each.name == BASE else "disable the term"
                    raise ObjectiveError(
                        f"Term {each.name!r} needs {need}, and this flow gives {', '.join(given) or 'nothing'} "
                        f"beside the logprobs: {remedy}, or use a flow that gives it."
                    )


def _bind_base(base_loss: object) -> Regularizer | None:
    params: Mapping[str, Any] = {}
    if callable(base_loss):
        term = base_loss if isinstance(base_loss, Term) else sdk_term(BASE, base_loss)
    else:
        spec = _base_spec(base_loss)
        if spec.name == CROSS_ENTROPY:
            find_base_loss(CROSS_ENTROPY).check_params(spec.params)
            return None
        if spec.name in BASE_LOSSES:
            term = policy_loss_term(spec.name, spec.params)
        else:
            term, params = registered_terms()[spec.name], spec.params
    if term.kind != "differentiable":
        raise ObjectiveError(f"The base loss {term.name!r} is a {term.kind} term: only a differentiable one can be it.")
    return Regularizer(BASE, term, Constant(value=1.0), check_params(term, params))


def _base_spec(base_loss: object) -> BaseLossSpec:
    try:
        spec = BaseLossSpec.model_validate({"name": base_loss} if isinstance(base_loss, str) else base_loss)
    except ValidationError as error:
        raise ObjectiveError(f"The base loss {base_loss!r} is unknown: {explain(error)}.") from error
    if spec.name not in BASE_LOSSES.keys() | registered_terms().keys():
        raise ObjectiveError(
            f"The base loss {spec.name!r} is unknown: it is one of {', '.join(BASE_LOSSES)}, a registered term, or "
            "a callable (data, logprobs) -> (loss, metrics)."
        )
    return spec


def _bind(entry: RegularizerSpec | Mapping[str, Any], modules: Collection[str] | None) -> tuple[Regularizer, bool]:
    """The bound term, and whether it is enabled: what is disabled is checked all the same."""
    if not isinstance(entry, RegularizerSpec | Mapping):
        raise ObjectiveError(
            f"A regularizer is {entry!r} where a RegularizerSpec or a dict of its fields is expected: write "
            "{'name': ..., 'fn': ..., 'weight': ...}."
        )
    written = dict(entry)
    fn = written.get("fn")
    if callable(fn):
        del written["fn"]
        written.setdefault("name", getattr(fn, "name", None) or getattr(fn, "__name__", None))
    try:
        spec = RegularizerSpec.model_validate(written)
    except ValidationError as error:
        raise ObjectiveError(f"Regularizer {written.get('name')!r} is wrong: {explain(error)}.") from error
    if isinstance(fn, Term):
        term = fn
    elif callable(fn):
        term = sdk_term(spec.name, fn)
    else:
        term = find_term(spec.fn or spec.name, modules)
    _check_givable(spec.name, term)
    _check_execution(spec, term)
    schedule = spec.weight if isinstance(spec.weight, WeightSchedule) else Constant(value=spec.weight)
    params = check_params(term, spec.params)
    settings = {key: getattr(spec, key) for key in ("every", "retries", "on_error", "execution", "timeout_s")}
    return Regularizer(spec.name, term, schedule, params, **settings), spec.enabled


def _check_givable(name: str, term: Term) -> None:
    for need in set(term.needs) - {TOPK}:
        if f"{need}_DT" not in {field.name for field in (*fields(Outputs), *fields(Batch))}:
            raise ObjectiveError(
                f"Term {name!r} needs {need}, which no Tinker service returns: it gives one logprob per "
                "token; write the term on those."
            )


def _check_execution(spec: RegularizerSpec, term: Term) -> None:
    if spec.execution == "inline" and spec.timeout_s is not None:
        raise ObjectiveError(
            f"Term {spec.name!r} has a timeout_s of {spec.timeout_s:g} and the execution 'inline', which cannot be "
            "stopped: leave out timeout_s, or take 'thread', 'async' or 'process'."
        )
    if spec.execution in PLACES:
        where = "a process" if spec.execution == "process" else f"a worker of {spec.execution}"
        try:
            importable(term)
            if spec.execution != "process":
                library(spec.execution)
        except ExecutionError as error:
            raise ObjectiveError(f"Term {spec.name!r} cannot have {where}: {error}.") from error
    functions = (term.evaluate, term.prepare)
    if spec.execution == "async" and not any(map(inspect.iscoroutinefunction, functions)):
        raise ObjectiveError(
            f"Term {spec.name!r} has the execution 'async' and no async function: write `async def`, or take another "
            "execution."
        )
