"""One term on one batch: its value, its metrics, and its gradient by the logprobs, computed once."""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from objectives.batch import TOPK, Batch, Outputs
from objectives.diagnostics import ROW_METRICS, all_finite
from objectives.errors import NotFiniteError, ObjectiveError
from objectives.estimators import ESTIMATORS
from objectives.execution.event_loop import wait_for
from objectives.losses import cross_entropy
from objectives.own_copy import changed, own_copy
from objectives.reductions import mean_by_datum, reduce
from objectives.regularizer import BASE, Regularizer
from objectives.term import own_params

if TYPE_CHECKING:
    from objectives.objective import Objective

# What MLflow takes, and short enough to stand behind the names of its term and objective.
_METRIC = re.compile(r"[\w./ -]{1,100}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one term says about one batch, before its weight.

    Attributes:
        name: the term's name in its objective; ``"base"`` for the base loss.
        value: the term, reduced to one number.
        gradient_DT: ``(N,)``, of the logprobs' dtype (float32 from a service): d value / d logprobs; zeros
            for a monitor.
        metrics: the term's own metrics.
        duration_s: wall time of the evaluation, seconds.
        by_datum_D: ``(D,)``, the term's value at each datum, or the mean over its tokens; None where it has but one for
            the batch.
    """

    name: str
    value: float
    gradient_DT: Tensor
    metrics: dict[str, float] = field(default_factory=dict)
    duration_s: float = 0.0
    by_datum_D: Tensor | None = None


def prepare_features(regularizer: Regularizer, batch: Batch) -> Any:
    """What a term makes of the data alone, ahead of the service; ``None`` for a term without ``prepare``."""
    prepare = regularizer.term.prepare
    if prepare is None:
        return None
    own = own_copy(batch)
    try:
        features = _call(regularizer, prepare, own)
        _check_unchanged(changed(own))
        return features
    except Exception as error:
        raise failure(regularizer, "preparing", error) from error


def evaluate_base(objective: Objective, outputs: Outputs, batch: Batch, first_step: bool = True) -> Evaluation:
    """Evaluate the base loss.

    The gradient of cross_entropy, ``-weights``, is written down, not derived.

    Raises:
        ObjectiveError: as `evaluate_term` does.
    """
    if objective.base is not None:
        # A policy loss is right to be flat: all its ratios may be clipped, all its rewards be as expected.
        may_be_flat = "advantages" in objective.base.term.needs
        return evaluate_term(objective.base, outputs, batch, first_step and not may_be_flat)
    start = time.perf_counter()
    value = float(cross_entropy(outputs.logprobs_DT, batch.weights_DT))
    gradient_DT = -batch.weights_DT.to(outputs.logprobs_DT.dtype)
    _check_finite(BASE, value, gradient_DT)
    return Evaluation(BASE, value, gradient_DT, {}, time.perf_counter() - start)


def evaluate_term(regularizer: Regularizer, outputs: Outputs, batch: Batch, first_step: bool) -> Evaluation:
    """Evaluate one term and its gradient.

    Args:
        batch: with ``features`` as `prepare_features` returned them.
        first_step: whether to refuse a term declared differentiable that has no gradient.

    Raises:
        ObjectiveError: the term raises, returns what its kind does not allow, or is not finite; names it.
    """
    start = time.perf_counter()
    _check_inputs(regularizer, outputs, batch)
    value, gradient_DT, metrics, by_datum_D = _differentiate(regularizer, outputs, batch)
    _check_finite(regularizer.name, value, gradient_DT)
    # A run that skips failures gets past the first step, so there every step is checked.
    checked = first_step or regularizer.on_error != "raise"
    if checked and regularizer.term.kind == "differentiable" and not gradient_DT.any():
        _refuse_constant(regularizer, outputs, batch)
    return Evaluation(regularizer.name, value, gradient_DT, metrics, time.perf_counter() - start, by_datum_D)


def _differentiate(
    regularizer: Regularizer, outputs: Outputs, batch: Batch
) -> tuple[float, Tensor, dict[str, float], Tensor | None]:
    term = regularizer.term
    own_outputs, own_batch = own_copy(outputs), own_copy(batch)
    logprobs_DT = own_outputs.logprobs_DT.requires_grad_(term.kind != "monitor")
    gradient_DT = None
    try:
        with torch.enable_grad():
            returned = _call(regularizer, term.evaluate, own_outputs, own_batch)
            _check_unchanged([*changed(own_outputs), *changed(own_batch)])
            value, metrics = _split(returned, is_monitor=term.kind == "monitor")
            value = _as_tensor(value, outputs)
            total = _total(regularizer, own_outputs, batch, value)
        if total.requires_grad:
            (gradient_DT,) = torch.autograd.grad(total, logprobs_DT, allow_unused=True)
    except Exception as error:
        raise failure(regularizer, "evaluating", error) from error
    if gradient_DT is None:
        gradient_DT = torch.zeros_like(logprobs_DT, requires_grad=False)
    return total.item(), gradient_DT, metrics, _by_datum(value.detach(), batch)


def _call(regularizer: Regularizer, function: Callable[..., Any], *arguments: object) -> Any:
    """What one of a term's functions returns; awaited where it is async."""
    returned = function(*arguments, **own_params(function, regularizer.params))
    if not inspect.isawaitable(returned):
        return returned
    return wait_for(returned, regularizer.timeout_s if regularizer.execution == "async" else None)


def _split(returned: Any, is_monitor: bool) -> tuple[Any, dict[str, float]]:
    """The value and the metrics of ``value``, ``(value, metrics)``, or a monitor's ``metrics``."""
    match returned:
        case Mapping() if is_monitor:
            value, metrics = 0.0, returned
        case (value, Mapping() as metrics):
            pass
        case _:
            value, metrics = returned, {}
    if taken := ROW_METRICS & metrics.keys():
        raise ObjectiveError(f"its metrics {', '.join(sorted(taken))} are kept for every term: call them otherwise")
    if wrong := [key for key in metrics if not (isinstance(key, str) and _METRIC.fullmatch(key))]:
        raise ObjectiveError(
            f"its metric {wrong[0]!r} has a name that no tracker takes: use up to 100 letters, digits, '_', '-', '.', "
            "'/' and spaces"
        )
    return value, {
        key: float(number.detach() if isinstance(number, Tensor) else number) for key, number in metrics.items()
    }


def _as_tensor(value: Any, outputs: Outputs) -> Tensor:
    try:
        return torch.as_tensor(value, dtype=outputs.logprobs_DT.dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ObjectiveError(
            f"it returned {type(value).__name__} where numbers are expected: return value or (value, metrics)"
        ) from error


def _by_datum(value: Tensor, batch: Batch) -> Tensor | None:
    if value.shape == (batch.num_datums,):
        return value
    return mean_by_datum(value, batch) if value.shape == (batch.num_tokens,) else None


def _total(regularizer: Regularizer, outputs: Outputs, batch: Batch, value: Tensor) -> Tensor:
    """The 0-d tensor whose gradient is the term's."""
    term = regularizer.term
    if term.kind == "monitor":
        return value.detach().sum()
    if term.estimator is not None:
        estimator = ESTIMATORS[term.estimator]
        expected = batch.num_tokens if term.estimator == "unlikelihood" else batch.num_datums
        if value.shape != (expected,):
            raise ObjectiveError(
                f"its scores have the shape {tuple(value.shape)} where the estimator {term.estimator!r} "
                f"expects ({expected},): return one score for each"
            )
        value = estimator(outputs, batch, value.detach(), **own_params(estimator, regularizer.params))
        if value.ndim == 0:
            return value
    return reduce(value, batch, term.reduction)


def _refuse_constant(regularizer: Regularizer, outputs: Outputs, batch: Batch) -> None:
    """Refuse a term that has no gradient here nor at logprobs spread over all that occur.

    A term may well be flat at one point: a KL divergence is where the policy still is its reference.
    """
    spread_DT = -torch.linspace(0.01, 10.0, outputs.logprobs_DT.numel()).to(outputs.logprobs_DT)
    spread_DT = spread_DT.reshape_as(outputs.logprobs_DT)
    # Both ways round: a margin that one of them keeps is flat there, and the other breaks it.
    both = (replace(outputs, logprobs_DT=each) for each in (spread_DT, spread_DT.flip(0)))
    if not any(_differentiate(regularizer, each, batch)[1].any() for each in both):
        raise ObjectiveError(
            f"Term {regularizer.name!r} is declared differentiable, but its value does not depend on the "
            "logprobs, so it would train nothing: declare it kind='scored', and an estimator makes a gradient of its "
            "scores, or kind='monitor', for metrics only."
        )


def _check_inputs(regularizer: Regularizer, outputs: Outputs, batch: Batch) -> None:
    if outputs.logprobs_DT.shape != batch.target_tokens_DT.shape:
        raise ObjectiveError(
            f"Term {regularizer.name!r} got logprobs of shape {tuple(outputs.logprobs_DT.shape)} where the "
            f"batch has {batch.num_tokens} tokens: pack the service's answer with the offsets of the same batch."
        )
    if TOPK in regularizer.term.needs and outputs.logprobs_DT.ndim != 2:
        raise ObjectiveError(
            f"Term {regularizer.name!r} needs {TOPK}, several targets at each position, and this batch has one: give "
            "datums with target_tokens and weights of shape (T, K), or take the term's form for sampled tokens."
        )
    for need in set(regularizer.term.needs) - {TOPK}:
        if getattr(outputs, f"{need}_DT", None) is None and getattr(batch, f"{need}_DT", None) is None:
            raise ObjectiveError(
                f"Term {regularizer.name!r} needs {need}, which these outputs and their batch lack: use a flow that "
                "gives it, or disable the term."
            )
    for need in ("ref_logprobs", "sampling_logprobs"):
        given_DT = getattr(outputs, f"{need}_DT")
        if given_DT is not None and given_DT.shape != outputs.logprobs_DT.shape:
            raise ObjectiveError(
                f"Term {regularizer.name!r} got {need} of shape {tuple(given_DT.shape)} where the logprobs have "
                f"{tuple(outputs.logprobs_DT.shape)}: ask both models for the same targets."
            )
    if regularizer.term.prepare is not None and batch.features is None:
        raise ObjectiveError(
            f"Term {regularizer.name!r} needs its prepared features, and the batch came without: put what "
            "`prepare_features` returns into `features` of the batch."
        )


def _check_unchanged(names: Sequence[str]) -> None:
    if names:
        raise ObjectiveError(f"it changed {', '.join(names)} of what it was given: let it change a clone")


def _check_finite(name: str, value: float, gradient_DT: Tensor) -> None:
    if not math.isfinite(value):
        raise NotFiniteError(
            f"Term {name!r} has the value {value} where a finite one is expected: look for a logarithm or a "
            "division of zero in it, or for logprobs that are not finite."
        )
    if not all_finite(gradient_DT):
        num_bad = int((~gradient_DT.isfinite()).sum())
        raise NotFiniteError(
            f"The gradient of term {name!r} is not finite at {num_bad} of {len(gradient_DT)} tokens, though "
            "its value is: clamp what it divides by or takes the root or logarithm of."
        )


def failure(regularizer: Regularizer, doing: str, error: Exception) -> ObjectiveError:
    """What went wrong with a term, as one sentence that names it."""
    reason = str(error) if isinstance(error, ObjectiveError) else f"it raised {type(error).__name__}: {error}"
    remedy = "" if regularizer.name == BASE else " (a run goes on without it under on_error='skip')"
    return ObjectiveError(f"Term {regularizer.name!r} failed {doing}: {' '.join(reason.split()).rstrip('.')}{remedy}.")
