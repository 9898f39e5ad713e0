"""Training with an objective in a custom loop on the Tinker SDK, without flows.

One step in two passes::

    forward (sent at once) ──────┬─> terms (concurrently) ──> linearize ──> forward_backward (sent)
    prepare (each term at once) ─┘

The gradient is requested only after every term succeeded, so a term that fails leaves the client as it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs, pack, pack_targets, unpack
from objectives.errors import ObjectiveError
from objectives.evaluate import Evaluation
from objectives.execution.term_loop import (
    DueTerm,
    Features,
    StepPosition,
    evaluate_terms,
    linearize_terms,
    once,
    prepare_terms,
)
from objectives.gradients.alerts import TermWarning
from objectives.gradients.linearize import Linearized, WeightedTerm
from objectives.labels import PROMPT, find_prompts, read_labels, read_text_labels
from objectives.objective import Objective
from objectives.one_pass.fused import check_trained
from objectives.one_pass.planner import OnePass, ServiceLoss
from objectives.sdk.futures import map_future
from objectives.sdk.protocols import ApiFuture, Datum, ForwardBackwardOutput, TensorData, Tokenizer, TrainingClient
from objectives.term import Regularizer
from objectives.term_weights.scale import Scale

# Optional inputs of a datum with one value per token; the batch has fields of the same names.
_TOKEN_INPUTS = ("advantages", "values", "returns")

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RegularizedOutput:
    """Result of a step: the fields of the SDK's ``ForwardBackwardOutput``, and a report on the terms.

    Attributes:
        loss_fn_output_type: name of the service's output records.
        loss_fn_outputs: fields of each datum, such as ``logprobs``.
        metrics: metrics of the service and of `linearize`; ``loss:sum`` is the total loss.
        skipped: reason of each term whose ``on_error`` let the step continue without it, by the term's name.
        warnings: problems of terms that have persisted for the ``patience`` of the objective's `WatchSpec`.
    """

    loss_fn_output_type: str
    loss_fn_outputs: Sequence[Mapping[str, TensorData]]
    metrics: dict[str, float]
    skipped: Mapping[str, str]
    warnings: tuple[TermWarning, ...]


def forward_backward_regularized(
    training_client: TrainingClient[ApiFuture[ForwardBackwardOutput]],
    data: Sequence[Datum],
    objective: Objective | OnePass,
    *,
    step: int = 0,
    num_steps: int = 1,
    ref_logprobs_D: Sequence[Tensor] | None = None,
) -> ApiFuture[RegularizedOutput]:
    """Run `forward_backward` with an objective as the loss, with the same requests as a flow.

    The terms are prepared while the service runs the forward pass, and evaluated on its result, both concurrently as
    their ``execution`` says. Then the backward pass is sent with the linearized weights. The function returns when the
    backward pass is sent, so `optim_step` can follow immediately, as after the SDK's `forward_backward`::

        pending = forward_backward_regularized(client, data, objective, step=step, num_steps=100)
        update = client.optim_step(tinker.AdamParams(learning_rate=1e-4))
        output = pending.result()
        print(output.metrics["term/confidence/grad_share"], output.skipped, output.warnings)
        update.result()

    A term's error is raised by this function, before the request that would change the gradient. The client stays
    usable, and no future fails because of the term. In an event loop, await `forward_backward_regularized_async`.

    Pass ``OnePass(objective, service_client)`` as the objective to run steps in one pass, if the base loss and every
    term can be traced (see ``backend`` of the objective). The service then computes the objective itself, the function
    returns without waiting for the service, and the terms are evaluated on the returned logprobs for metrics only.

    The function reads these ``loss_fn_inputs`` of a datum: ``target_tokens``; the trained tokens from ``weights``, else
    ``mask``, else non-zero ``advantages``, else all tokens; ``logprobs`` of the sampling policy, ``advantages``, and a
    critic's ``values`` and ``returns`` if the base loss or a term needs them; labels (`objectives.labels`). In two
    passes, only tokens and weights are sent to the service; in one pass, the inputs of the objective.

    Args:
        objective: the objective or its `OnePass`; reuse the same object for all steps.
        step: step index from 0; with ``num_steps``, it determines the scheduled weights and the terms due (``every``).
        ref_logprobs_D: nats: logprobs of the targets of each datum under the reference, shaped like the targets.

    Returns:
        The SDK's future of the pass that accumulates the gradient.

    Raises:
        ObjectiveError: the data lacks an input of the objective; a term failed and is not skipped, with the term's own
            exception among its causes; or the backend is ``server`` and the objective needs two passes. In one pass,
            the future raises if evaluating a term for its metrics fails.
    """
    return _plan(training_client, data, objective, step, num_steps, ref_logprobs_D)()


async def forward_backward_regularized_async(
    training_client: TrainingClient[ApiFuture[ForwardBackwardOutput]],
    data: Sequence[Datum],
    objective: Objective | OnePass,
    *,
    step: int = 0,
    num_steps: int = 1,
    ref_logprobs_D: Sequence[Tensor] | None = None,
) -> ApiFuture[RegularizedOutput]:
    """Run `forward_backward_regularized` without blocking the event loop; arguments and errors are the same.

    Like the SDK's async methods, it returns a future to await, so `optim_step` can be sent in between::

        pending = await forward_backward_regularized_async(client, data, objective, step=step, num_steps=100)
        update = client.optim_step(tinker.AdamParams(learning_rate=1e-4))
        output = await pending
        await update

    Terms run on threads of this call; a term with the execution ``inline`` runs on one of them. If the caller is
    cancelled, no request that changes the gradient is sent, and terms that are running finish in their threads.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="objective")
    plan = partial(_plan, training_client, data, objective, step, num_steps, ref_logprobs_D)
    try:
        send = await asyncio.wrap_future(thread.submit(copy_context().run, plan))
    finally:
        thread.shutdown(wait=False)
    return send()


def _plan(
    training_client: TrainingClient[ApiFuture[ForwardBackwardOutput]],
    data: Sequence[Datum],
    objective: Objective | OnePass,
    step: int,
    num_steps: int,
    ref_logprobs_D: Sequence[Tensor] | None,
) -> Callable[[], ApiFuture[RegularizedOutput]]:
    """Do everything that precedes the request for the gradient; return a function that sends this request."""
    one_pass, objective = _unwrap(objective)
    batch = pack_data(data, training_client.get_tokenizer())
    extra_outputs = _read_extra_outputs(data, ref_logprobs_D)
    topk = ["topk_logprobs"] if batch.target_tokens_DT.ndim == 2 else []
    token_inputs = [key for key in _TOKEN_INPUTS if getattr(batch, f"{key}_DT") is not None]
    objective.check_needs([*(key.removesuffix("_DT") for key in extra_outputs), *token_inputs, *topk])
    with ThreadTermExecutor(objective) as executor:
        objective.choose_estimators(batch)
        terms = prepare_terms(objective, batch, StepPosition(step, num_steps), executor)
        current = _Step(objective, batch, extra_outputs, terms, step, num_steps)
        loss = current.find_service_loss(one_pass)
        if one_pass and loss:
            current.wait_for_features()
            if objective.targets:
                one_pass.wait_for_metrics()
            factors = objective.factors(batch, step, num_steps)
            loss_data = loss.build_data(current.placeholder(), batch, factors)
            return lambda: one_pass.map_result(loss.send(training_client, loss_data), current.add_evaluation)
        forward = training_client.forward(current.weighted_data(batch.weights_DT), "cross_entropy")
        current.wait_for_features()
        evaluated = current.evaluate(executor, forward.result())
    backward_data = current.weighted_data(evaluated.linear.loss_weights_DT)

    def send() -> ApiFuture[RegularizedOutput]:
        pending = training_client.forward_backward(backward_data, "cross_entropy")
        return map_future(pending, current.report(evaluated).add_to_backward)

    return send


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """Linearized objective of a step, with the reasons of skipped terms."""

    linear: Linearized
    skipped: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Report:
    """Report on the terms of a step; see `RegularizedOutput`."""

    metrics: Mapping[str, float]
    total: float
    skipped: Mapping[str, str]
    warnings: tuple[TermWarning, ...]

    def add_to(self, output: ForwardBackwardOutput, **loss: float) -> RegularizedOutput:
        metrics = {**output.metrics, **self.metrics, **loss}
        return RegularizedOutput(
            output.loss_fn_output_type, output.loss_fn_outputs, metrics, self.skipped, self.warnings
        )

    def add_to_backward(self, output: ForwardBackwardOutput) -> RegularizedOutput:
        """Add the report to the second of two passes, whose own loss is the linearized one."""
        losses = {"loss:sum": self.total, "surrogate_loss:sum": output.metrics["loss:sum"]}
        return self.add_to(output, **losses)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step before its logprobs are known."""

    objective: Objective
    batch: Batch
    extra_outputs: Mapping[str, Tensor]
    terms: Sequence[DueTerm]
    step: int
    num_steps: int

    def placeholder(self) -> Outputs:
        """Return the outputs with logprobs of 0."""
        return Outputs(torch.zeros(self.batch.target_tokens_DT.shape), **self.extra_outputs)

    def find_service_loss(self, one_pass: OnePass | None) -> ServiceLoss | None:
        """Return the loss that the service computes; None if the step takes two passes."""
        if one_pass is None:
            return None
        loss = one_pass.loss_at(self.step, self.placeholder(), self.batch)
        for note in one_pass.pop_notes():
            _LOG.info(note)
        return loss

    def wait_for_features(self) -> None:
        """Wait until every term is prepared.

        Raises:
            ObjectiveError: preparing a term failed, and its ``on_error`` is ``raise``.
        """
        for term in self.terms:
            try:
                if term.features:
                    term.features()
            except ObjectiveError:
                if term.regularizer.on_error == "raise":
                    raise

    def weighted_data(self, weights_DT: Tensor) -> list[Datum]:
        """Return the datums with the inputs of cross_entropy alone."""
        return [
            # The SDK's datum converts tensors.
            replace(datum, loss_fn_inputs={"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": weights})
            for datum, weights in zip(self.batch.datums, unpack(weights_DT, self.batch.offsets_D), strict=True)
        ]

    def evaluate(self, executor: ThreadTermExecutor, output: ForwardBackwardOutput) -> _Evaluated:
        """Evaluate the terms and linearize the objective at the service's logprobs."""
        logprobs_DT = pack([fields["logprobs"].to_torch().float() for fields in output.loss_fn_outputs])[0]
        outputs, position = Outputs(logprobs_DT, **self.extra_outputs), StepPosition(self.step, self.num_steps)
        linear = evaluate_terms(self.objective, self.terms, outputs, self.batch, executor, position)
        return _Evaluated(linear, dict(executor.skipped))

    def add_evaluation(self, output: ForwardBackwardOutput) -> RegularizedOutput:
        """Evaluate the terms on the result of a single pass, and check that the service trained on the same loss."""
        with ThreadTermExecutor(self.objective) as executor:
            evaluated = self.evaluate(executor, output)
        check_trained(self.step, output.metrics["loss:sum"], evaluated.linear)
        return self.report(evaluated).add_to(output)

    def report(self, evaluated: _Evaluated) -> _Report:
        """Record the step in the objective; return its report."""
        metrics = evaluated.linear.metrics
        observed = self.objective.observe(self.step, metrics)
        warnings = tuple(self.objective.watch.pop_warnings())
        return _Report({**metrics, **observed}, evaluated.linear.total, evaluated.skipped, warnings)


class ThreadTermExecutor:
    """Term executor with one thread per term, for a single step; a context manager.

    A term with the execution ``inline`` runs on the thread that waits for it, after the other terms have started. On
    exit after an error, calls that have not started are dropped, and running ones finish in their threads.

    Attributes:
        skipped: reason of each term that was skipped, by its name.
    """

    def __init__(self, objective: Objective) -> None:
        self.skipped: dict[str, str] = {}
        self._runner = objective.runner
        self._threads = ThreadPoolExecutor(max(1, len(objective.regularizers)), thread_name_prefix="term")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=error is None, cancel_futures=True)

    def prepare(self, regularizer: Regularizer, batch: Batch) -> Features:
        return self._start(regularizer, lambda: self._runner.prepare(regularizer, batch))

    def evaluate(
        self, regularizer: Regularizer, features: Features | None, outputs: Outputs, batch: Batch, first_step: bool
    ) -> Callable[[], Evaluation]:
        def run() -> Evaluation:
            prepared = replace(batch, features=features()) if features else batch
            return self._runner.evaluate(regularizer, outputs, prepared, first_step)

        return self._start(regularizer, run)

    def linearize(
        self,
        objective: Objective,
        outputs: Outputs,
        batch: Batch,
        evaluated: Sequence[WeightedTerm],
        step: int,
        scale: Scale,
    ) -> Linearized:
        return linearize_terms(objective, outputs, batch, evaluated, step, scale)

    def report_skipped(self, step: int, regularizer: Regularizer, error: ObjectiveError) -> None:
        self.skipped[regularizer.name] = str(error)
        _LOG.warning("Step %d continues without a term. %s", step, error)

    def _start(self, regularizer: Regularizer, compute: Callable[[], T]) -> Callable[[], T]:
        """Start a call with its retries; the returned function waits for the result."""
        call = partial(_with_retries, regularizer, compute)
        if regularizer.execution == "inline":
            return once(call)
        return self._threads.submit(copy_context().run, call).result


def _with_retries(regularizer: Regularizer, compute: Callable[[], T]) -> T:
    for _ in range(regularizer.retries):
        try:
            return compute()
        except ObjectiveError:
            pass
    return compute()


def _unwrap(objective: Objective | OnePass) -> tuple[OnePass | None, Objective]:
    if isinstance(objective, OnePass):
        return objective, objective.objective
    if objective.backend == "server":
        raise ObjectiveError(
            "The objective's backend is 'server', which needs a service client; pass OnePass(objective, "
            "service_client) instead of the objective."
        )
    return None, objective


def pack_data(data: Sequence[Datum], tokenizer: Tokenizer) -> Batch:
    """Pack the service's datums into a batch; see `forward_backward_regularized` for the inputs that are read.

    The text of a datum is decoded from its trained targets. Datums with several targets per position have no text.
    """
    targets_D = _read_targets(data)
    weights_D = [_weights(datum, targets) for datum, targets in zip(data, targets_D, strict=True)]
    if weights_D and not any(weights.any() for weights in weights_D) and "weights" not in data[0].loss_fn_inputs:
        raise ObjectiveError(
            "No target is trained, because every `mask` or, without one, every advantage is 0: leave out this batch, "
            "or give its datums a `mask`."
        )
    return pack_targets(
        targets_D,
        weights_D,
        tokenizer.decode,
        datums=tuple(data),
        **{f"{key}_DT": _read_all(data, key) for key in _TOKEN_INPUTS},
        sampling_logprobs_DT=_read_all(data, "logprobs"),
        labels_D={PROMPT: find_prompts(data, weights_D), **read_labels(data)},
        text_labels_D=read_text_labels(data),
    )


def _read_targets(data: Sequence[Datum]) -> list[Tensor]:
    """Read the targets of each datum, and check that its other inputs have their shape.

    Raises:
        ObjectiveError: a datum has no targets, targets of another rank than the first, or an input of another shape.
    """
    targets_D: list[Tensor] = []
    for d, datum in enumerate(data):
        if "target_tokens" not in datum.loss_fn_inputs:
            raise ObjectiveError(f"Datum {d} has no target_tokens in its loss_fn_inputs: add the target of each token.")
        targets = datum.loss_fn_inputs["target_tokens"].to_torch().long()
        if targets.numel() == 0:
            raise ObjectiveError(f"target_tokens of datum {d} is empty: leave out the datum.")
        if targets_D and targets.shape[1:] != targets_D[0].shape[1:]:
            raise ObjectiveError(
                f"target_tokens of datum {d} has the shape {tuple(targets.shape)}, but that of datum 0 "
                f"{tuple(targets_D[0].shape)}: train on other numbers of targets per position in separate batches."
            )
        for key in ("weights", "mask", "logprobs", *_TOKEN_INPUTS):
            if key in datum.loss_fn_inputs:
                _check_shape(d, key, datum.loss_fn_inputs[key].to_torch(), targets)
        targets_D.append(targets)
    lacking = [d for d, datum in enumerate(data) if "logprobs" not in datum.loss_fn_inputs]
    if lacking and len(lacking) < len(data):
        raise ObjectiveError(
            f"Datum {lacking[0]} has no logprobs of the sampling policy, but other datums of the batch have: add them, "
            "or train on the datums without logprobs in batches of their own."
        )
    return targets_D


def _check_shape(d: int, name: str, values: Tensor, targets: Tensor) -> None:
    if values.shape != targets.shape:
        raise ObjectiveError(
            f"{name} of datum {d} has the shape {tuple(values.shape)}, but its target_tokens has "
            f"{tuple(targets.shape)}: give one value for each target."
        )


def _weights(datum: Datum, targets: Tensor) -> Tensor:
    """Return the weights of a datum's targets: ``weights``, else ``mask``, else non-zero ``advantages``, else ones."""
    for key in ("weights", "mask", "advantages"):
        if key in datum.loss_fn_inputs:
            weights = datum.loss_fn_inputs[key].to_torch().float()
            return (weights != 0).float() if key == "advantages" else weights
    return torch.ones(targets.shape)


def _read_all(data: Sequence[Datum], key: str) -> Tensor | None:
    """Pack one input of all datums; None if a datum does not have it."""
    if not all(key in datum.loss_fn_inputs for datum in data):
        return None
    return pack([datum.loss_fn_inputs[key].to_torch().float() for datum in data])[0]


def _read_extra_outputs(data: Sequence[Datum], ref_logprobs_D: Sequence[Tensor] | None) -> dict[str, Tensor]:
    """Read the fields of `Outputs` other than the current logprobs.

    Raises:
        ObjectiveError: the reference's logprobs do not fit the datums.
    """
    outputs: dict[str, Tensor] = {}
    if ref_logprobs_D is not None:
        if len(ref_logprobs_D) != len(data):
            raise ObjectiveError(
                f"ref_logprobs_D has {len(ref_logprobs_D)} entries for {len(data)} datums: give one for each datum."
            )
        for d, (datum, logprobs) in enumerate(zip(data, ref_logprobs_D, strict=True)):
            _check_shape(d, "ref_logprobs_D", logprobs, datum.loss_fn_inputs["target_tokens"].to_torch())
        outputs["ref_logprobs_DT"] = pack([logprobs.float() for logprobs in ref_logprobs_D])[0]
    sampling_logprobs_DT = _read_all(data, "logprobs")
    if sampling_logprobs_DT is not None:
        outputs["sampling_logprobs_DT"] = sampling_logprobs_DT
    return outputs
