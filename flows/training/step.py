"""A step in flight: its minibatches before and after they are sent, their objective, and the time of the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import cast

import tinker
import torch
from prefect.logging import get_run_logger
from torch import Tensor

from flows.runs.run import Run
from objectives.batch import Batch, Outputs
from objectives.execution.term_loop import DueTerm, StepPosition, evaluate_terms, prepare_terms
from objectives.gradients.linearize import Linearized
from objectives.objective import Objective
from objectives.one_pass.fused import check_trained
from objectives.one_pass.planner import OnePass, ServiceLoss
from tasks.common.service_errors import service_errors
from tasks.common.task import Pending, call, opaque_argument, submit
from tasks.training.checkpoints import PendingCheckpoint
from tasks.training.forward_backward import PendingOutput, PendingUpdate, forward_logprobs
from tasks.training.reference import Reference, load_reference
from tasks.training.terms import TaskTermExecutor


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """Batch or minibatch with everything that is computed before its forward pass; all of it may be pending.

    Attributes:
        at: its step, and its share of the update.
        passes: maximum passes of the service over it: 1, or 2 if a forward pass may come first.
        batch: the packed datums.
        reference: the reference's logprobs, ``(N,)`` nats; None if no term of the step needs them.
        terms: the terms due at the step, with their features.
        prompts: for a batch of sampled candidates, the supervised batch whose prompts they complete; else None.
    """

    at: StepPosition
    passes: int
    batch: Pending[Batch]
    reference: Pending[Tensor] | None
    terms: tuple[DueTerm, ...]
    prompts: Pending[Batch] | None = None

    @property
    def is_candidates(self) -> bool:
        """Return whether the batch holds sampled candidates."""
        return self.prompts is not None

    def outputs(self, logprobs_DT: Tensor | None = None) -> Outputs:
        """Return the logprobs that the terms read; the current ones are 0 if they are not known yet."""
        batch = self.batch.result()
        if logprobs_DT is None:
            logprobs_DT = torch.zeros(batch.target_tokens_DT.shape)
        return Outputs(logprobs_DT, self.reference.result() if self.reference else None, batch.sampling_logprobs_DT)


@dataclass(frozen=True, slots=True)
class SentBatch:
    """Batch that has been sent, with its linearized objective if a forward pass came first.

    A batch that teaches nothing is only scored: its `update` is a forward pass.
    """

    prepared: PreparedBatch
    update: PendingUpdate
    linearized: Linearized | None
    is_only_scored: bool = False


@dataclass(frozen=True, slots=True)
class SentStep:
    """Step whose updates have been sent; `batches` is empty if the step is skipped.

    Attributes:
        batches: its minibatches.
        effect_passes: forward passes over the minibatches after the update, if its effects are measured.
        save: the save after the update, if one is due.
        elapsed_tokens: tokens of the batches sent up to and including this step, without candidates.
    """

    batches: Sequence[SentBatch]
    effect_passes: Sequence[PendingOutput]
    save: PendingCheckpoint | None
    elapsed_tokens: int

    def changes(self, before: Sequence[Tensor]) -> list[Tensor]:
        """Wait for the passes after the update; return the change of each minibatch's logprobs, ``(D, T)`` in nats."""
        batches = [sent.prepared.batch.result() for sent in self.batches]
        passes = zip(self.effect_passes, batches, before, strict=True)
        return [
            call(forward_logprobs, pending, opaque_argument(batch)).logprobs_DT - before_DT
            for pending, batch, before_DT in passes
        ]


class StepTimes:
    """Durations of the steps, and of what the flow waits for within them."""

    def __init__(self) -> None:
        self._step_ended = perf_counter()
        self._waits: dict[str, float] = {}

    @contextmanager
    def waiting_for(self, name: str) -> Iterator[None]:
        """Add the duration of the block to the metric `time/<name>` of the step."""
        began = perf_counter()
        try:
            yield
        finally:
            self._waits[name] = self._waits.get(name, 0.0) + perf_counter() - began

    def end_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the duration and the waits of the step that ends now, and its trained and sampled tokens per second.

        Args:
            metrics: the other metrics of the step, with its tokens.
        """
        began, self._step_ended = self._step_ended, perf_counter()
        waits, self._waits = self._waits, {}
        seconds = self._step_ended - began
        times = {"time/step": seconds} | {f"time/{name}": wait for name, wait in waits.items()}
        for name, key in (("train", "num_tokens"), ("sample", "rollout/num_sampled_tokens")):
            if key in metrics:
                times[f"throughput/{name}_tokens_per_s"] = metrics[key] / seconds
        return times


def prepare_batch(
    batch: Pending[Batch],
    objective: Objective,
    reference: Reference | None,
    executor: TaskTermExecutor,
    at: StepPosition,
    passes: int,
) -> PreparedBatch:
    """Start the work that needs only the batch: the features of its terms and the reference logprobs."""
    terms = prepare_terms(objective, batch, at, executor)
    loaded = cast(Batch, batch)  # a task receives the result of a future that is passed to it
    pending = submit(load_reference, reference, opaque_argument(loaded), at.step) if reference else None
    return PreparedBatch(at, passes, batch, pending, terms)


class StepObjective:
    """Objective of a run's minibatches: the service computes it in one pass, or the run computes it from logprobs."""

    def __init__(self, run: Run, objective: Objective, executor: TaskTermExecutor, *, needs_forward_pass: bool) -> None:
        """Create the objective.

        Args:
            needs_forward_pass: whether a guard checks the objective before each update.
        """
        self._objective, self._executor, self._log = objective, executor, run.log
        self._needs_forward_pass = needs_forward_pass
        self._one_pass = OnePass(objective, run.session)

    def needs_logprobs(self, prepared: PreparedBatch) -> bool:
        """Return whether the update of a minibatch needs a forward pass before it."""
        return prepared.passes == 2 and self.service_loss(prepared) is None

    def service_loss(self, prepared: PreparedBatch) -> ServiceLoss | None:
        """Return the loss with which the service trains on a minibatch in one pass.

        None if the minibatch takes two passes, or if cross-entropy is the whole objective and needs no such loss. The
        service cannot leave out cross-entropy, so a minibatch on which only terms train takes two passes, also with the
        backend `server`.

        Raises:
            ObjectiveError: the backend is `server`, and the objective cannot be one pass.
            ServiceError: the service failed before it answered whether it accepts the loss.
        """
        step, batch = prepared.at.step, prepared.batch.result()
        if prepared.is_candidates or self._needs_forward_pass:
            return None
        if self._objective.base is None and not (batch.trains_base and self._objective.due(step)):
            return None
        try:
            loss = self._one_pass.loss_at(step, prepared.outputs(), batch)
        except tinker.TinkerError:  # `service_errors` also converts a ValueError, which the objective may raise
            with service_errors("take the objective as a loss"):
                raise
        for note in self._one_pass.pop_notes():
            if any(term.on_candidates for term in self._objective.regularizers):
                note += " The sampled candidates take a forward pass and an update in addition."
            get_run_logger().info(note)
            self._log.tag("tinker_flows.passes", note)
        return loss

    def linearize(self, prepared: PreparedBatch, logprobs_DT: Tensor) -> Linearized:
        """Evaluate the terms of a minibatch and linearize its objective at the current logprobs."""
        outputs, batch = prepared.outputs(logprobs_DT), prepared.batch.result()
        prompts = prepared.prompts.result() if prepared.prompts else None
        return evaluate_terms(self._objective, prepared.terms, outputs, batch, self._executor, prepared.at, prompts)

    def measure(self, sent: SentBatch, logprobs_DT: Tensor) -> Linearized:
        """Linearize the objective of an update that took one pass, for its metrics.

        Raises:
            ObjectiveError: the service has trained on another loss.
        """
        linearized = self.linearize(sent.prepared, logprobs_DT)
        if not sent.is_only_scored:
            loss = sent.update.forward_backward.result().metrics["loss:sum"]
            check_trained(sent.prepared.at.step, loss, linearized)
        return linearized
