"""Objective: a base loss and weighted terms, validated on construction."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from types import TracebackType
from typing import Self, TypedDict

from pydantic import BaseModel, ValidationError

from objectives.base_loss import PolicyLoss, policy_loss_term
from objectives.batch import TOPK, Batch, Outputs
from objectives.config.import_path import ImportedFunction
from objectives.config.import_policy import NotAllowedError
from objectives.config.spec import Backend, BalanceSpec, BaseLossSpec, ObjectiveSpec, RegularizerSpec, WatchSpec
from objectives.config.term_lookup import find_term, registered_terms
from objectives.errors import ExecutionError, ObjectiveError, explain
from objectives.estimators import BATCH_RISK, Choice, choose_estimator, fixed_data_refusal
from objectives.execution.process import importable
from objectives.execution.runner import LastValue, TermRunner
from objectives.gradients.alerts import Watch, WatchState
from objectives.gradients.balance import Balance, BalanceState, make_balance
from objectives.losses import BASE_LOSSES, find_base_loss
from objectives.losses.policy.correction import Correction
from objectives.sdk.custom_loss import sdk_term
from objectives.term import BASE, Need, Regularizer, Term, check_params, definition_of
from objectives.term_weights.scale import Scale, compute_scale, gain_unit, plain_scale
from objectives.term_weights.schedule import Constant, WeightSchedule
from objectives.term_weights.targets import Targets, TargetStates

CROSS_ENTROPY = "cross_entropy"


class ObjectiveState(TypedDict, total=False):
    """State of an `Objective` for resuming a run, as JSON data.

    Attributes:
        watch: state of the checks of the metrics.
        balance: state of the balancing rule; empty without a rule.
        targets: state of each target by the name of the term.
        passes: number of passes per step.
        last: last values of the terms with ``on_error: last``.
        estimators: estimators of the scored terms by term name.
        has_chosen: true if the data has chosen the estimators.
        on_candidates: names of the terms that train on sampled candidates.
    """

    watch: WatchState
    balance: BalanceState
    targets: TargetStates
    passes: int | None
    estimators: dict[str, str]
    has_chosen: bool
    on_candidates: list[str]
    last: dict[str, LastValue]


class Objective:
    """Training objective ``total = base + sum_i weight_i * term_i``.

    The objective's `runner` runs the terms. If a term is async or has the execution ``process``, use the objective as a
    context manager (or call ``runner.close()``) to end its event loop and processes.

    Args:
        base_loss: the name of a loss, such as ``"cross_entropy"`` or ``"ppo"``, or of a term, such as ``"dpo"``; a
            `BaseLossSpec` or its fields as a dict, ``{"name": "ppo", "params": {...}}``; a `Term`; or a callable with
            the SDK's signature ``CustomLossFnV1``, ``(data, logprobs) -> (loss, metrics)``.
        regularizers: `RegularizerSpec` objects, or dicts of their fields. In a dict, ``fn`` may also be a `Term`, which
            provides the default name, or a callable with the SDK's signature.
        balance: rule that adapts the weights at each step: a spec, such as ``WeightingSpec(method="dualproj")``, or an
            object with the methods of `objectives.gradients.balance.Balance`. A spec's random numbers have the seed 0.
        watch: thresholds of warnings.
        backend: selection between one and two passes per step; see `objectives.one_pass.planner`.

    Raises:
        ObjectiveError: an argument is invalid.

    >>> objective = Objective(regularizers=[{"name": "confidence", "weight": 0.1}])
    >>> [(term.name, term.weight_at(step=0, num_steps=10)) for term in objective.regularizers]
    [('confidence', 0.1)]
    """

    __slots__ = (
        "_configured_estimators",
        "_has_chosen",
        "backend",
        "balance",
        "base",
        "passes",
        "regularizers",
        "runner",
        "scaled",
        "targets",
        "watch",
    )

    base: Regularizer | None
    """Base loss as a term of weight 1; ``None`` for cross_entropy, whose gradient needs no autograd."""
    regularizers: tuple[Regularizer, ...]
    """Enabled terms in the given order."""
    runner: TermRunner
    """Runner that evaluates the terms with their configured execution."""
    balance: Balance | None
    """Rule that adapts the weights at each step."""
    targets: Targets
    """Controllers of the weights of terms with a target."""
    watch: Watch
    """Checks of the metrics of consecutive steps, which produce warnings."""
    backend: Backend
    """Allowed numbers of passes per step."""
    passes: int | None
    """Number of passes of the service per step, 1 or 2; ``None`` before the first step."""
    scaled: bool
    """False for the conventions of release 0.1; see `keep_conventions_of_0_1`."""

    def __init__(
        self,
        base_loss: str | BaseLossSpec | Mapping[str, object] | Term | Callable[..., object] = CROSS_ENTROPY,
        regularizers: Iterable[RegularizerSpec | Mapping[str, object]] = (),
        balance: BalanceSpec | Balance | None = None,
        watch: WatchSpec | None = None,
        backend: Backend = "auto",
    ) -> None:
        self.base = _bind_base(base_loss)
        bound = [_bind(entry) for entry in regularizers]
        names = {BASE}
        for regularizer, _ in bound:
            if regularizer.name in names:
                problem = "is reserved for the base loss" if regularizer.name == BASE else "is used twice"
                raise ObjectiveError(f"The regularizer name {regularizer.name!r} {problem}; choose a unique `name`.")
            names.add(regularizer.name)
        self.regularizers = tuple(regularizer for regularizer, enabled in bound if enabled)
        self.runner = TermRunner()
        self.balance = make_balance(balance) if isinstance(balance, BaseModel) else balance
        self.targets = Targets({term.name: term.target for term in self.regularizers if term.target})
        self.watch = Watch(watch or WatchSpec())
        self.backend, self.passes, self.scaled = backend, None, True
        self._has_chosen = False
        self._configured_estimators = {term.name: term.estimator for term in self.regularizers}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.runner.close()

    @classmethod
    def from_spec(cls, spec: ObjectiveSpec, seed: int = 0) -> Objective:
        """Create an objective from a spec.

        Args:
            seed: seed of a balancing rule that draws random numbers; the run's seed.
        """
        balance = make_balance(spec.balance, seed) if spec.balance else None
        return cls(spec.base_loss, spec.regularizers, balance, spec.watch, spec.backend)

    def state(self) -> ObjectiveState:
        """Return the state for resuming a run, as JSON data."""
        balance = self.balance.state() if self.balance else {}
        estimators = {term.name: term.estimator for term in self.regularizers if term.estimator is not None}
        return {
            "watch": self.watch.state(),
            "balance": balance,
            "targets": self.targets.state(),
            "passes": self.passes,
            "last": self.runner.state(),
            "estimators": estimators,
            "has_chosen": self._has_chosen,
            "on_candidates": [term.name for term in self.regularizers if term.on_candidates],
        }

    def restore(self, state: ObjectiveState) -> None:
        """Restore a state; an empty state resets."""
        self.watch.restore(state.get("watch", {}))
        self.runner.restore(state.get("last", {}))
        if self.balance:
            self.balance.restore(state.get("balance", {}))
        self.targets.restore(state.get("targets", {}))
        # States of releases without one-pass steps have no "passes"; their runs continue with two.
        self.passes = state.get("passes", 2 if state else None)
        self._set_estimators(self._configured_estimators | state.get("estimators", {}))
        self._set_candidate_terms(state.get("on_candidates", ()))
        self._has_chosen = state.get("has_chosen", False)

    def needs(self, need: Need) -> bool:
        """Check whether the base loss or an enabled term reads an input."""
        return any(need in term.term.needs for term in self._all_terms())

    def needs_at(self, need: Need, step: int) -> bool:
        """Check whether the base loss or a term that is due on the batch of a step reads an input."""
        return any(need in term.term.needs for term in (*self._base_terms(), *self.due(step)))

    def check_needs(self, given: Collection[str] = (), *, can_sample: bool = False) -> None:
        """Check that a flow provides all inputs of the terms.

        Args:
            given: inputs that the flow provides in addition to the current logprobs, such as ``"ref_logprobs"``,
                ``"sampling_logprobs"``, ``"advantages"``.
            can_sample: True if the flow can sample candidates, which have sampling logprobs.

        Raises:
            ObjectiveError: a term needs an input that the flow does not provide, or has the estimator
                ``score_function`` although the flow has no samples and cannot sample candidates.
        """
        for term in self._all_terms():
            if term.estimator == "score_function" and "sampling_logprobs" not in given and not can_sample:
                raise ObjectiveError(f"Term {term.name!r} cannot run here: {fixed_data_refusal()}.")
            for need in term.term.needs:
                if need not in given:
                    fix = "use another base loss" if term.name == BASE else "disable the term"
                    raise ObjectiveError(
                        f"Term {term.name!r} needs {need}, but this flow provides only the logprobs and "
                        f"{', '.join(given) or 'no other input'}; {fix}, or use a flow that provides it."
                    )

    @property
    def has_open_choice(self) -> bool:
        """True while the data must still choose the estimator of a term, or its candidates; see `choose_estimators`."""
        return not self._has_chosen and any(
            regularizer.estimator in ("auto", "score_function") for regularizer in self.regularizers
        )

    def due(self, step: int, *, on_candidates: bool = False) -> list[Regularizer]:
        """Return the terms that are due at a step, on the batch or on its sampled candidates."""
        return [term for term in self.regularizers if term.on_candidates == on_candidates and term.due_at(step)]

    def trains_terms(self, step: int, num_steps: int) -> bool:
        """Return whether a term changes the gradient of a batch at a step: one that is due and has a weight."""
        due = [term for term in self.due(step) if term.term.kind != "monitor"]
        return any(self.weight_at(term, step, num_steps) != 0 for term in due)

    def measures_effects(self, step: int) -> bool:
        """Return whether a run measures the effects of the update of a step on the terms."""
        trains_terms = any(regularizer.term.kind != "monitor" for regularizer in self.regularizers)
        every = self.watch.effect_every
        return trains_terms and every > 0 and step % every == 0

    def choose_estimators(self, batch: Batch, *, can_sample: bool = False) -> dict[str, str]:
        """Choose the estimators that depend on the data (``auto``) from a batch; return the reasons by term name.

        Args:
            can_sample: whether completions of the batch's prompts can be sampled. The terms then train on these if no
                estimator fits the batch.

        Raises:
            ObjectiveError: no estimator fits the batch, and `can_sample` is False.
        """
        auto = [regularizer.name for regularizer in self.regularizers if regularizer.estimator == "auto"]
        if can_sample and batch.sampling_logprobs_DT is None:  # on fixed data, `score_function` needs candidates
            self._set_candidate_terms([term.name for term in self.regularizers if term.estimator == "score_function"])
        if not auto:
            self._has_chosen = True
            return {}
        choice = choose_estimator(batch)
        if choice.estimator is None and not can_sample:
            raise ObjectiveError(
                f"The scores of {', '.join(auto)} cannot train, because {choice.reason}; provide several completions "
                "of each prompt in a batch, sample candidates (`candidates` of sft), or disable the term."
            )
        if choice.estimator is None:
            choice = Choice("score_function", f"{choice.reason}, so that the model samples candidates")
            self._set_candidate_terms([*auto, *(term.name for term in self.regularizers if term.on_candidates)])
        self._set_estimators(dict.fromkeys(auto, choice.estimator))
        self._has_chosen = True
        return dict.fromkeys(auto, f"{choice.estimator}, because {choice.reason}")

    def keep_conventions_of_0_1(self) -> None:
        """Scale and estimate as release 0.1 did, for a run that it started."""
        self.scaled = False
        scored = [regularizer.name for regularizer in self.regularizers if regularizer.estimator == "auto"]
        self._set_estimators(dict.fromkeys(scored, BATCH_RISK))

    def keep_unweighted_kl(self) -> None:
        """Estimate `kl` without importance ratios, for a run that was started before they were introduced."""
        self.regularizers = tuple(
            replace(regularizer, term=find_term("kl_unweighted")) if regularizer.term.name == "kl" else regularizer
            for regularizer in self.regularizers
        )

    @property
    def correction(self) -> Correction | None:
        """Correction of the base loss; None for none."""
        policy_loss = self.base.term.evaluate if self.base else None
        return policy_loss.correction if isinstance(policy_loss, PolicyLoss) else None

    def correct(self, correction: Correction | None) -> None:
        """Correct the base loss for samples of another policy, or remove its correction with None.

        Raises:
            ObjectiveError: a correction is given, but the base loss is not a policy loss by name, or has a penalty that
                depends on the sampler's logprobs.
        """
        policy_loss = self.base.term.evaluate if self.base else None
        if self.base is None or not isinstance(policy_loss, PolicyLoss):
            if correction is not None:
                raise ObjectiveError(
                    "A correction needs a policy loss of this package, such as 'ppo', as the base loss; set one, or "
                    "remove the correction."
                )
            return
        term = policy_loss_term(policy_loss.loss.name, policy_loss.params, correction)
        self.base = replace(self.base, term=term)

    def weight_at(self, regularizer: Regularizer, step: int, num_steps: int) -> float:
        """Return a term's weight at a step; with a target, the controller's current weight, whatever the step is."""
        if regularizer.target:
            return self.targets.weight_of(regularizer.name)
        return regularizer.weight_at(step, num_steps)

    def set_gain_unit(self, regularizer: Regularizer, batch: Batch, supervised: Batch | None = None) -> None:
        """Set the unit of the gains of a term with a target, unless an earlier batch has set it; see `gain_unit`."""
        if regularizer.target:
            self.targets.set_gain_unit(regularizer.name, gain_unit(regularizer, self.base, batch, supervised))

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Record the metrics of a trained step, for the next weights of terms with a target and for warnings.

        Returns:
            Metrics of the targets (`Targets.observe`) and moving averages (`Watch.observe`).
        """
        targets = self.targets.observe(step, metrics)
        return targets | self.watch.observe(step, {**metrics, **targets})

    def scale(self, batch: Batch, share: float = 1.0) -> Scale:
        """Return the scale of a batch; see `objectives.term_weights.scale`.

        Args:
            share: share of the batch in its update: one over the number of minibatches.
        """
        scale = compute_scale(self.base, batch, share) if self.scaled else plain_scale(self.base, share)
        return scale if batch.trains_base else replace(scale, base=0.0)

    def factors(self, batch: Batch, step: int, num_steps: int, share: float = 1.0) -> Callable[[Regularizer], float]:
        """Return the function from a term, or the base loss, to its factor in the trained sum of a batch."""
        scale = self.scale(batch, share)

        def factor(regularizer: Regularizer) -> float:
            if regularizer.name == BASE:
                return scale.base
            return self.weight_at(regularizer, step, num_steps) * scale.of(regularizer, batch)

        return factor

    def _set_candidate_terms(self, names: Collection[str]) -> None:
        self.regularizers = tuple(
            replace(regularizer, on_candidates=regularizer.name in names) for regularizer in self.regularizers
        )

    def _set_estimators(self, names: Mapping[str, str | None]) -> None:
        self.regularizers = tuple(
            replace(regularizer, estimator=names.get(regularizer.name, regularizer.estimator))
            for regularizer in self.regularizers
        )

    def _all_terms(self) -> tuple[Regularizer, ...]:
        return (*self._base_terms(), *self.regularizers)

    def _base_terms(self) -> tuple[Regularizer, ...]:
        return (self.base,) if self.base else ()


def _bind_base(base_loss: object) -> Regularizer | None:
    """Bind the base loss as a term of weight 1; return None for cross_entropy."""
    params: Mapping[str, object] = {}
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
        raise ObjectiveError(f"The base loss {term.name!r} is a {term.kind} term; use a differentiable term.")
    return Regularizer(BASE, term, Constant(value=1.0), check_params(term, params))


def _base_spec(base_loss: object) -> BaseLossSpec:
    try:
        spec = BaseLossSpec.model_validate({"name": base_loss} if isinstance(base_loss, str) else base_loss)
    except ValidationError as error:
        raise ObjectiveError(f"The base loss {base_loss!r} is wrong: {explain(error)}.") from error
    if spec.name not in BASE_LOSSES.keys() | registered_terms().keys():
        raise ObjectiveError(
            f"The base loss {spec.name!r} is unknown; use one of {', '.join(BASE_LOSSES)}, a registered term, or a "
            "callable (data, logprobs) -> (loss, metrics)."
        )
    return spec


def _bind(entry: RegularizerSpec | Mapping[str, object]) -> tuple[Regularizer, bool]:
    """Bind a regularizer; return it and its ``enabled``. Disabled regularizers are validated as well."""
    if not isinstance(entry, RegularizerSpec | Mapping):
        raise ObjectiveError(
            f"A regularizer is {entry!r}, not a RegularizerSpec or a dict of its fields; write "
            "{'name': ..., 'fn': ..., 'weight': ...}."
        )
    fields_by_name = dict(entry)
    fn = fields_by_name.get("fn")
    if callable(fn):
        del fields_by_name["fn"]
        if fields_by_name.get("name") is None:
            fields_by_name["name"] = _default_name(fn)
    try:
        spec = RegularizerSpec.model_validate(fields_by_name)
    except ValidationError as error:
        raise ObjectiveError(f"Regularizer {fields_by_name.get('name')!r} is wrong: {explain(error)}.") from error
    if isinstance(fn, Term):
        term = fn
    elif callable(fn):
        term = sdk_term(spec.name, fn)
    else:
        term = find_term(spec.fn or spec.name)
    _check_available(spec.name, term)
    _check_execution(spec, term)
    _check_target(spec, term)
    schedule = spec.weight if isinstance(spec.weight, WeightSchedule) else Constant(value=spec.weight or 0.0)
    params = check_params(term, spec.params)
    _load_functions(spec.name, params)
    settings = {key: getattr(spec, key) for key in ("every", "retries", "on_error", "execution", "timeout_s")}
    estimator = _bind_estimator(spec, term)
    bound = Regularizer(spec.name, term, schedule, params, **settings, estimator=estimator, target=spec.target)
    return bound, spec.enabled


def _load_functions(name: str, params: Mapping[str, object]) -> None:
    """Import the functions that a term's parameters name, so that a wrong path fails before the first step."""
    for function in params.values():
        if isinstance(function, ImportedFunction):
            try:
                function.load()
            except NotAllowedError:
                raise
            except ObjectiveError as error:
                raise ObjectiveError(f"The parameters of term {name!r} are wrong: {error}.") from error


def _bind_estimator(spec: RegularizerSpec, term: Term) -> str | None:
    """Return the estimator of a term: the spec's, or the term's own for `auto`; None if it is not scored."""
    if term.kind == "scored":
        return term.estimator if spec.estimator == "auto" else spec.estimator
    if spec.estimator != "auto":
        raise ObjectiveError(
            f"Term {spec.name!r} has estimator {spec.estimator!r}, but it is a {term.kind} term, which needs none; "
            "remove the estimator."
        )
    return None


def _default_name(fn: Callable[..., object]) -> str:
    """Return the name of a term or function, or of the function in a `functools.partial`."""
    name = getattr(fn, "name", None) or definition_of(fn).__name__
    if name in ("<lambda>", "__call__"):
        kind = "lambda" if name == "<lambda>" else type(fn).__name__
        raise ObjectiveError(
            f"The `fn` of a regularizer is a {kind}, which has no name; write {{'name': 'my_term', 'fn': ..., ...}}."
        )
    return name


def _check_available(name: str, term: Term) -> None:
    for need in set(term.needs) - {TOPK}:
        if f"{need}_DT" not in {field.name for field in (*fields(Outputs), *fields(Batch))}:
            raise ObjectiveError(
                f"Term {name!r} needs {need}, which no Tinker service returns; write the term on the logprobs of the "
                "target tokens."
            )


def _check_target(spec: RegularizerSpec, term: Term) -> None:
    if spec.target is None:
        return
    if term.kind == "monitor":
        raise ObjectiveError(
            f"Term {spec.name!r} has a target, but it is a monitor, which has no gradient; remove the target, or use a "
            "differentiable or scored term."
        )
    if spec.target.metric is not None and spec.target.metric not in term.metric_values:
        raise ObjectiveError(
            f"The target of term {spec.name!r} is on the metric {spec.target.metric!r}, for which the term declares no "
            f"gradient; use {', '.join(term.metric_values) or 'the value of the term'}."
        )


def _check_execution(spec: RegularizerSpec, term: Term) -> None:
    if spec.execution == "inline" and spec.timeout_s is not None:
        raise ObjectiveError(
            f"Term {spec.name!r} has timeout_s={spec.timeout_s:g} and the execution 'inline', which has no time limit; "
            "remove timeout_s, or set execution to 'thread', 'async' or 'process'."
        )
    if spec.execution == "process":
        try:
            importable(term)
        except ExecutionError as error:
            raise ObjectiveError(f"Term {spec.name!r} cannot run in a process: {error}.") from error
    functions = (term.evaluate, term.prepare)
    if spec.execution == "async" and not any(map(inspect.iscoroutinefunction, functions)):
        raise ObjectiveError(
            f"Term {spec.name!r} has the execution 'async' but no async function; write `async def`, or use another "
            "execution."
        )
