"""Evaluation of one term on one batch: value, metrics and gradient with respect to the logprobs."""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from objectives.batch import TOPK, Batch, Outputs
from objectives.errors import NotFiniteError, ObjectiveError, exit_call, place_in_user_code
from objectives.estimators import ESTIMATORS, choose_estimator, num_compared, num_prompts
from objectives.event_loop import wait_for
from objectives.gradients.diagnostics import RESERVED_TERM_METRICS, all_finite
from objectives.losses import cross_entropy
from objectives.reductions import mean_by_datum, reduce
from objectives.term import BASE, Regularizer, definition_of, own_params
from objectives.torch_internals import count_changes

# Characters that MLflow allows, and a length that leaves room for the prefix with the term's name.
SKIP_HINT = " (set on_error='skip' to continue without it)"
_METRIC = re.compile(r"[\w./ -]{1,100}", re.ASCII)
# First and last logprob of spreads over the usual and over all probabilities. Both orders: a margin can be met, and
# flat, in one order, but not in the other. Equal ones also exceed the limit of a mean.
_PROBES = ((-0.01, -10.0), (-10.0, -0.01), (-1e-4, -100.0), (-100.0, -1e-4), (-1e-4, -1e-4), (-100.0, -100.0))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Unweighted value, gradient and metrics of one term on one batch.

    Attributes:
        name: the term's name in its objective; ``"base"`` for the base loss.
        value: reduced value of the term.
        gradient_DT: ``(N,)``, or ``(N, K)`` with K targets per position; dtype of the logprobs (float32 from a
            service): d value / d logprobs; 0 for a monitor.
        metrics: the term's own metrics; for a term with one score per datum also ``trained_prompts``, the share of
            prompts whose scores differ.
        duration_s: wall time of the evaluation, seconds.
        by_datum_D: ``(D,)``: value of each datum, or mean over its tokens; None for a term with one value per batch.
    """

    name: str
    value: float
    gradient_DT: Tensor
    metrics: dict[str, float] = field(default_factory=dict)
    duration_s: float = 0.0
    by_datum_D: Tensor | None = None


def prepare_features(regularizer: Regularizer, batch: Batch) -> object:
    """Call a term's ``prepare`` on a batch; return None for a term without ``prepare``.

    Raises:
        ObjectiveError: ``prepare`` raises or changes its input, or is async and exceeds the term's time limit.
    """
    prepare = regularizer.term.prepare
    if prepare is None:
        return None
    own = own_copy(batch)
    try:
        features = _call(regularizer, prepare, own)
        _check_unchanged(changed(own))
        return features
    except (Exception, SystemExit) as error:
        raise failure(regularizer, "preparing", error) from error


def evaluate_base(base: Regularizer | None, outputs: Outputs, batch: Batch, first_step: bool = True) -> Evaluation:
    """Evaluate the base loss of an objective.

    Args:
        base: `Objective.base`; ``None`` for cross_entropy, whose gradient is ``-weights``.

    Raises:
        ObjectiveError: see `evaluate_term`.
    """
    if base is not None:
        # A policy loss can have zero gradient, if all ratios are clipped or all advantages are 0.
        may_be_flat = "advantages" in base.term.needs
        return evaluate_term(base, outputs, batch, first_step and not may_be_flat)
    start = time.perf_counter()
    value = float(cross_entropy(outputs.logprobs_DT, batch.weights_DT))
    gradient_DT = -batch.weights_DT.to(outputs.logprobs_DT.dtype)
    _check_finite(BASE, value, gradient_DT)
    return Evaluation(BASE, value, gradient_DT, {}, time.perf_counter() - start)


def evaluate_term(regularizer: Regularizer, outputs: Outputs, batch: Batch, first_step: bool) -> Evaluation:
    """Evaluate one term and its gradient.

    Args:
        batch: batch with ``features`` from `prepare_features`.
        first_step: True to reject a term of the user that is declared differentiable but has no gradient. A term whose
            ``on_error`` is not ``raise`` is checked at every step, because the first one may have been skipped.

    Raises:
        ObjectiveError: an input of the term is missing or has another shape; the term raises, changes its input, is
            async and exceeds its time limit, or returns a value that its kind does not allow; the value or the gradient
            is not finite; or the value of a differentiable term does not depend on the logprobs.
    """
    start = time.perf_counter()
    _check_inputs(regularizer, outputs, batch)
    value, gradient_DT, metrics, by_datum_D = _differentiate(regularizer, outputs, batch)
    _check_finite(regularizer.name, value, gradient_DT)
    # Built-in terms depend on the logprobs, but not on every batch: without a shared token, sequences are orthogonal.
    is_built_in = definition_of(regularizer.term.evaluate).__module__.startswith("objectives.terms.")
    checked = (first_step or regularizer.on_error != "raise") and not is_built_in
    if checked and regularizer.term.kind == "differentiable" and not gradient_DT.any():
        _reject_constant(regularizer, outputs, batch)
    return Evaluation(regularizer.name, value, gradient_DT, metrics, time.perf_counter() - start, by_datum_D)


def _differentiate(
    regularizer: Regularizer, outputs: Outputs, batch: Batch
) -> tuple[float, Tensor, dict[str, float], Tensor | None]:
    """Evaluate a term; return its value, gradient, metrics and, if it has one, its value per datum."""
    term = regularizer.term
    own_outputs, own_batch = own_copy(outputs), own_copy(batch)
    logprobs_DT = own_outputs.logprobs_DT.requires_grad_(term.kind != "monitor")
    gradient_DT = None
    try:
        with torch.enable_grad():
            returned = _call(regularizer, term.evaluate, own_outputs, own_batch)
            _check_unchanged([*changed(own_outputs), *changed(own_batch)])
            value, metrics = _split(returned, is_monitor=term.kind == "monitor")
            # A target that constrains one of the term's metrics trains on this metric instead of the term's value.
            if regularizer.metric is not None:
                value = _call(regularizer, term.metric_values[regularizer.metric], own_outputs, own_batch)
            value = _as_tensor(value, outputs)
            total = _total(regularizer, own_outputs, batch, value)
        if term.kind == "scored" and value.shape == (batch.num_datums,):
            metrics["trained_prompts"] = num_compared(batch, value.detach()) / num_prompts(batch)
        if total.requires_grad:
            (gradient_DT,) = torch.autograd.grad(total, logprobs_DT, allow_unused=True)
    except (Exception, SystemExit) as error:
        raise failure(regularizer, "evaluating", error) from error
    if gradient_DT is None:
        gradient_DT = torch.zeros_like(logprobs_DT, requires_grad=False)
    return total.item(), gradient_DT, metrics, _by_datum(value.detach(), batch)


def _call(regularizer: Regularizer, function: Callable[..., object], *arguments: object) -> object:
    """Call one of a term's functions, and await an async one."""
    returned = function(*arguments, **own_params(function, regularizer.params))
    if not inspect.isawaitable(returned):
        return returned
    return wait_for(returned, regularizer.timeout_s if regularizer.execution == "async" else None)


def _split(returned: object, is_monitor: bool) -> tuple[object, dict[str, float]]:
    """Split a result ``value``, ``(value, metrics)`` or, for a monitor, ``metrics`` into value and metrics."""
    match returned:
        case Mapping() if is_monitor:
            value, metrics = 0.0, returned
        case (value, Mapping() as metrics):
            pass
        case _:
            value, metrics = returned, {}
    if reserved := RESERVED_TERM_METRICS & metrics.keys():
        raise ObjectiveError(f"its metric names {', '.join(sorted(reserved))} are reserved; rename them")
    if invalid := [key for key in metrics if not (isinstance(key, str) and _METRIC.fullmatch(key))]:
        raise ObjectiveError(
            f"its metric name {invalid[0]!r} is invalid; use up to 100 letters, digits, '_', '-', '.', '/' and spaces"
        )
    return value, {key: _as_number(key, number) for key, number in metrics.items()}


def _as_number(metric: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ObjectiveError(f"its metric {metric!r} is {type(value).__name__} instead of one number") from error


def _as_tensor(value: object, outputs: Outputs) -> Tensor:
    """Convert a value to the dtype of the logprobs. Nested lists of tensors keep their gradients."""
    try:
        stacked: Any = _stack(value)
        if not (stacked.is_complex() if isinstance(stacked, Tensor) else np.iscomplexobj(stacked)):
            return torch.as_tensor(stacked, dtype=outputs.logprobs_DT.dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ObjectiveError(
            f"it returned {type(value).__name__} instead of numbers; return value or (value, metrics)"
        ) from error
    raise ObjectiveError("it returned complex numbers; return real ones, such as their absolute values")


def _stack(value: object) -> object:
    """Stack lists that contain tensors; a tensor with one element, of any shape, counts as a number in them."""
    if not isinstance(value, list | tuple):
        return value
    entries = [_stack(entry) for entry in value]
    if not any(isinstance(entry, Tensor) for entry in entries):
        return value
    tensors = [torch.as_tensor(entry) for entry in entries]
    return torch.stack([tensor.reshape(()) if tensor.numel() == 1 else tensor for tensor in tensors])


def _by_datum(value: Tensor, batch: Batch) -> Tensor | None:
    if value.shape == (batch.num_datums,):
        return value
    return mean_by_datum(value, batch) if value.shape == (batch.num_tokens,) else None


def _total(regularizer: Regularizer, outputs: Outputs, batch: Batch, value: Tensor) -> Tensor:
    """Reduce the value to a 0-d tensor with the gradient of the term."""
    term = regularizer.term
    if term.kind == "monitor":
        return value.detach().sum()
    if term.kind == "scored":
        name = estimator_of(regularizer, batch)
        estimator = ESTIMATORS[name]
        expected = batch.num_tokens if estimator.per_token else batch.num_datums
        if value.shape != (expected,):
            raise ObjectiveError(
                f"its scores have the shape {tuple(value.shape)}, but the estimator {name!r} expects ({expected},); "
                f"return one score per {'token' if estimator.per_token else 'datum'}"
            )
        params = own_params(estimator.function, regularizer.params)
        value = estimator.function(outputs, batch, value.detach(), **params)
        if value.ndim == 0:
            return value
    return reduce(value, batch, term.reduction)


def estimator_of(regularizer: Regularizer, batch: Batch) -> str:
    """Return the name of a scored term's estimator.

    While the choice is open (``"auto"``), it depends on the batch: `minimum_risk` if no estimator fits, so that the
    term has a value, but no gradient.
    """
    if regularizer.estimator == "auto":
        return choose_estimator(batch).estimator or "minimum_risk"
    assert regularizer.estimator is not None, "scored terms have an estimator"
    return regularizer.estimator


def _reject_constant(regularizer: Regularizer, outputs: Outputs, batch: Batch) -> None:
    """Reject a term without gradient at the current logprobs and at those of `_PROBES`.

    Zero gradient at one point is valid: a KL divergence has zero gradient while the policy equals its reference.
    """
    logprobs_DT = outputs.logprobs_DT
    candidates = (
        replace(outputs, logprobs_DT=torch.linspace(*ends, logprobs_DT.numel()).to(logprobs_DT).reshape_as(logprobs_DT))
        for ends in _PROBES
    )
    # A gradient of NaN comes from a value that overflows.
    if not any(_differentiate(regularizer, candidate, batch)[1].nan_to_num(0.0).any() for candidate in candidates):
        raise ObjectiveError(
            f"Term {regularizer.name!r} is declared differentiable, but its value does not depend on the "
            "logprobs, so it would train nothing; declare kind='scored' to estimate a gradient from its values, or "
            "kind='monitor' for metrics only."
        )


def _check_inputs(regularizer: Regularizer, outputs: Outputs, batch: Batch) -> None:
    if outputs.logprobs_DT.shape != batch.target_tokens_DT.shape:
        raise ObjectiveError(
            f"Term {regularizer.name!r} received logprobs of shape {tuple(outputs.logprobs_DT.shape)}, but the targets "
            f"of the batch have {tuple(batch.target_tokens_DT.shape)}; pass the service's result for the same batch."
        )
    if TOPK in regularizer.term.needs and outputs.logprobs_DT.ndim != 2:
        raise ObjectiveError(
            f"Term {regularizer.name!r} needs {TOPK}, several targets per position, but the batch has one; use datums "
            "with target_tokens and weights of shape (T, K), or the term's variant for sampled tokens."
        )
    for need in set(regularizer.term.needs) - {TOPK}:
        if getattr(outputs, f"{need}_DT", None) is None and getattr(batch, f"{need}_DT", None) is None:
            raise ObjectiveError(
                f"Term {regularizer.name!r} needs {need}, which the outputs and the batch do not have; use a flow that "
                "provides it, or disable the term."
            )
    for need in ("ref_logprobs", "sampling_logprobs"):
        other_DT = getattr(outputs, f"{need}_DT")
        if other_DT is not None and other_DT.shape != outputs.logprobs_DT.shape:
            raise ObjectiveError(
                f"Term {regularizer.name!r} received {need} of shape {tuple(other_DT.shape)}, but the logprobs have "
                f"{tuple(outputs.logprobs_DT.shape)}; compute both for the same targets."
            )
    if regularizer.term.prepare is not None and batch.features is None:
        raise ObjectiveError(
            f"Term {regularizer.name!r} needs prepared features, but the batch has none; set `features` of the batch "
            "to the result of `prepare_features`."
        )


def _check_unchanged(names: Sequence[str]) -> None:
    if names:
        raise ObjectiveError(f"it changed its input {', '.join(names)} in place; change a clone")


def _check_finite(name: str, value: float, gradient_DT: Tensor) -> None:
    if not math.isfinite(value):
        raise NotFiniteError(
            f"Term {name!r} has the value {value}, which is not finite; check it for a logarithm or division of zero, "
            "and the logprobs for values that are not finite."
        )
    if not all_finite(gradient_DT):
        num_bad = int((~gradient_DT.isfinite()).sum())
        raise NotFiniteError(
            f"The gradient of term {name!r} is not finite at {num_bad} of {gradient_DT.numel()} logprobs; "
            "clamp its denominators and the arguments of roots and logarithms."
        )


def failure(regularizer: Regularizer, doing: str, error: Exception | SystemExit) -> ObjectiveError:
    """Return an error whose message is one sentence with the term's name and the reason."""
    reason = str(error)
    if isinstance(error, SystemExit):
        reason = f"it called {exit_call(error)}{place_in_user_code(error)}"
    elif not isinstance(error, ObjectiveError):
        reason = f"it raised {type(error).__name__}: {reason.rstrip('.')}{place_in_user_code(error)}"
    is_fatal = regularizer.name != BASE and regularizer.on_error == "raise"
    hint = SKIP_HINT if is_fatal else ""
    return ObjectiveError(f"Term {regularizer.name!r} failed {doing}: {' '.join(reason.split()).rstrip('.')}{hint}.")


R = TypeVar("R", Batch, Outputs)


def own_copy(record: R) -> R:
    """Copy a record and its tensors; texts, text labels, features and datums are shared."""
    copied = copy(record)  # `dataclasses.replace` would validate the batch again.
    for entry in fields(record):
        match getattr(record, entry.name):
            case Tensor() as tensor:
                object.__setattr__(copied, entry.name, tensor.detach().clone())
            case Mapping() as tensors if entry.name == "labels_D":
                object.__setattr__(copied, entry.name, {key: tensor.clone() for key, tensor in tensors.items()})
    return copied


def changed(copied: Batch | Outputs) -> list[str]:
    """Return the names of the tensors that were changed in place since `own_copy`, except through `Tensor.data`.

    >>> import torch
    >>> copied = own_copy(Outputs(torch.tensor([1.0, 2.0])))
    >>> changed(copied), copied.logprobs_DT[:1].zero_(), changed(copied)
    ([], tensor([0.]), ['logprobs_DT'])
    """
    return [name for name, tensor in _tensors(copied) if count_changes(tensor) > 0]


def _tensors(record: Batch | Outputs) -> Iterator[tuple[str, Tensor]]:
    for entry in fields(record):
        value = getattr(record, entry.name)
        if isinstance(value, Tensor):
            yield entry.name, value
        elif isinstance(value, Mapping) and entry.name == "labels_D":
            yield from ((f"{entry.name}[{key!r}]", tensor) for key, tensor in value.items())
