"""Training loop of every method.

One step, as tasks:

    batch ──> prepare (each term), reference ───┐                  started during the previous step
    forward (enqueued behind the last update) ──┴─> term (each) ──> linearize ──> forward_backward, optim_step
                                                                                  └─ then the next step's forward

If the service can compute the objective by itself, there is no forward pass: forward_backward and optim_step are sent
right after those of the previous step, and terms and linearize run on the responses, only to compute metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tinker_cookbook.checkpoint_utils import CheckpointRecord
from tinker_cookbook.eval.evaluators import Evaluator
from torch import Tensor

from blocks.errors import ConfigError
from blocks.garbage_collection import no_collector_pauses
from blocks.terminal import print_notice
from flows.config.train import TrainConfig
from flows.monitoring.interrupts import StopRequest, deferred_interrupts
from flows.monitoring.progress import Pauses, Progress, call_step_callback
from flows.monitoring.run_tags import note_terms
from flows.runs.checkpoints.checkpoint_manager import Checkpoints
from flows.runs.result import EndReasons, TrainResult, finish
from flows.runs.run import Run
from flows.runs.start.config_record import keep_recorded_conventions
from flows.runs.start.contents import open_contents
from flows.runs.start.resume import origin_step, resolve_start, restore_metrics
from flows.runs.teachers import open_reference
from flows.runs.tracking.lineage import data_assets
from flows.runs.tracking.prompts import register_prompts
from flows.training.budget import RunLedger
from flows.training.evaluation import Evaluation
from flows.training.granularity import run_segment, run_step
from flows.training.guards import Guard
from flows.training.plan import ExpectedTokens, announce_plan, num_passes
from flows.training.preflight import (
    announce_first_batch,
    check_passes,
    choose_estimators,
    warn_about_candidates,
    warn_of_pitfalls,
)
from flows.training.schedule import CheckpointCadence, Schedule
from flows.training.step import (
    PreparedBatch,
    SentBatch,
    SentStep,
    StepObjective,
    StepTimes,
    prepare_batch,
)
from flows.training.watch import RunWatch
from objectives.batch import Batch
from objectives.execution.term_loop import StepPosition
from objectives.gradients.linearize import Linearized, join_metrics, measure_effects
from objectives.losses.cross_entropy import compute_mean_nll, weights_cancel
from objectives.objective import Objective
from tasks.common.datum_cache import load_cache, save_cache
from tasks.common.task import call, opaque_argument
from tasks.evaluation.evaluators import ConfiguredEvaluator
from tasks.reports.summary import format_steps
from tasks.training.batch_source import BatchSource, TrainedBatch
from tasks.training.candidates import CandidateSampler
from tasks.training.checkpoints import CONTENTS_KEY, PendingCheckpoint, step_of
from tasks.training.forward_backward import (
    PendingOutput,
    PendingUpdate,
    enqueue_forward,
    enqueue_one_pass_update,
    enqueue_update,
    forward_backward,
    forward_logprobs,
    optim_step,
)
from tasks.training.reference import REFERENCE_NAME, Reference
from tasks.training.terms import TaskTermExecutor
from tasks.training.tracking.metrics import log_metrics
from tasks.training.tracking.metrics_file import MetricsFile


class Trainer:
    """Training loop and its state.

    Requests are enqueued in one thread, in order: update, save, the next forward pass. So a checkpoint contains exactly
    the updates before its step, and unless batches are sampled, the next request is usually queued while the service
    computes an update.

    Attributes:
        guard: skips, stops or rolls back bad steps.
        watch: warns of what the metrics of a step show.
        ledger: counts tokens, time and cost against the budget.
        evaluation: evaluates the weights before the steps at which an evaluation is due.
        expected_tokens: says which tokens the coming steps are expected to take.
        checkpoints: saves and records checkpoints.
        contents: digests of the content that the run depends on.
        cadence: says when a periodic checkpoint is due.
        next_step: step after the newest one whose responses are read.
        prepared: minibatches of the next step; empty for a skipped step, None after the last step and if the run ends
            early.
        forward: the requested forward pass of the first prepared minibatch; None if that minibatch needs none.
        sent: the next step, if its updates are sent already.
        last_batch: the batch of the newest update, without candidates.
        unchecked: saves of weights that no response has confirmed yet, each with the state to record.
        times: durations of the step in progress.
    """

    def __init__(  # noqa: PLR0913 - the parts of a run
        self,
        run: Run,
        config: TrainConfig,
        source: BatchSource,
        objective: Objective,
        evaluators: Sequence[Evaluator | ConfiguredEvaluator],
        reference: Reference | None = None,
        candidates: CandidateSampler | None = None,
    ) -> None:
        """Restore the state of the run, and open the reference if a term needs one.

        Args:
            reference: the reference, if the flow has opened it.
            candidates: samples completions for scored terms that no estimator can train on the data; None to reject
                such terms.
        """
        check_passes(config, objective)
        self.run, self.config, self.source, self.objective = run, config, source, objective
        self.candidates = candidates
        schedule = Schedule(config, source.steps_per_epoch)
        self.start = resolve_start(run, config, schedule.steps_per_epoch, schedule.num_steps)
        self.first_step = step_of(self.start) if self.start else 0
        self.schedule = schedule = replace(schedule, first=origin_step(run.directory))
        restore_metrics(run, self.start, schedule.num_steps)
        run.log.file = MetricsFile(run.directory, self.first_step)
        run.log.starts_over = self.start is None or self.start.has("parent")  # no checkpoint of its own
        self.contents = open_contents(run, config, objective, source, self.start)
        warn_of_pitfalls(run, config)
        load_cache(objective.runner.cache, run.directory)
        if reference is None and objective.needs("ref_logprobs"):
            # Samples do not repeat, so their scores are not worth keeping.
            reference = open_reference(run, config, uses_cache=not source.sampled)
        self.reference = reference
        data = data_assets(config, self.contents.digests.get("data", {}))
        self.checkpoints = Checkpoints(run, config, schedule.steps_per_epoch, self.start, data)
        self._restore(self.start)
        self.executor = TaskTermExecutor(objective.runner, run.task_runner, objective.regularizers)
        needs_forward_pass = config.guards.needs_forward_pass
        self.step_objective = StepObjective(run, objective, self.executor, needs_forward_pass=needs_forward_pass)
        self.evaluation = Evaluation(
            run, config, schedule, evaluators, objective, reference, candidates, self.executor, self.guard, self.ledger
        )
        self.expected_tokens = ExpectedTokens(
            config, schedule, source, objective, self.evaluation, candidates, has_reference=reference is not None
        )

        self.prepared: Sequence[PreparedBatch] | None = None
        self.forward: PendingOutput | None = None
        self.sent: SentStep | None = None
        self.last_batch: Batch | None = None
        self.unchecked: list[tuple[PendingCheckpoint, dict[str, Any]]] = []
        self.times = StepTimes()

    def train(self) -> TrainResult:
        """Run the remaining steps within the budget, then save a checkpoint and the report.

        Raises:
            ConfigError: There is nothing to train, or the budget does not cover the first step of a new run.
            GuardError: A step was bad, and the guard policy stops the run.
            RolledBackError: A step was bad, and the run has to resume from its last checkpoint without the step.
            KeyboardInterrupt, TerminationSignal, RunCancelled, Pause: The run was stopped after the current step or
                evaluation, and its weights are saved.
        """
        first, num_steps = self.first_step, self.schedule.num_steps
        if first == self.schedule.first:  # no step has been trained yet
            steps = range(first, num_steps)
            self.guard.check_batches(self.source.untrained_steps(steps), len(steps))
        with (
            closing(self.executor),
            closing(self.candidates) if self.candidates else nullcontext(),
            closing(self.evaluation),
        ):
            self._start(first, num_steps)
            last = self._run_steps(first, num_steps)
        assert last is not None
        reasons = EndReasons(self.ledger.stopped, self.checkpoints.rejection, self.checkpoints.approval_request)
        targets = {**self.objective.targets.specs, **self.source.targets}
        return finish(self.run, self.config.run_name, last, first, reasons, targets)

    def _start(self, first: int, num_steps: int) -> None:
        """Start the first step, and say what the run will do.

        Raises:
            ConfigError: The budget does not cover the first step of a new run.
        """
        self._prepare(first)
        note_terms(self.run.log, self.objective.regularizers)
        warn_about_candidates(self.run, self.config, self.objective)
        self._request_forward(first)
        if self.prepared:
            steps, is_new = range(first, num_steps), first == self.schedule.first
            batch = self.prepared[0].batch.result()
            num_tokens, trained = batch.num_tokens * len(self.prepared), self.cadence.num_tokens
            planned = self.expected_tokens.of_run(
                steps, num_tokens, trained, self.guard.skipped_steps, self.ledger, in_one_pass=not self.forward
            )
            announce_plan(self.run.log, self.config, steps, planned, evaluates=self.evaluation.has_evaluators)
            if is_new:
                digests, is_sampled = self.contents.digests.get("data", {}), self.source.sampled
                announce_first_batch(self.run, self.config, self.objective, batch, digests, is_sampled=is_sampled)
        if self.config.register_prompts:
            register_prompts(self.run.log, self.config, self.run.client.get_tokenizer())
        if self.ledger.stopped and self.start is None:
            raise ConfigError(self.ledger.stopped)

    def _run_steps(self, first: int, num_steps: int) -> CheckpointRecord | None:
        """Run the steps from the first one on; return the record of the last checkpoint."""
        pauses = Pauses(self.schedule.evaluations(), self.schedule.saves())
        with (
            no_collector_pauses(),
            Progress(self.config.run_name, first, num_steps, self.run.log, pauses) as progress,
            deferred_interrupts() as stop,
            self.checkpoints,
        ):

            def run_one(step: int) -> None:
                metrics = self._step(step, stop)
                if metrics is not None:
                    progress.advance(metrics)

            def run_all(steps: range) -> bool:
                """Run steps; return True if a stop or the budget ends the run here, whose weights are then saved."""
                for step in steps:
                    run_step(self.config.granularity, step, run_one)
                    # An update that is sent already is in the weights, so a stop waits for its step.
                    if self.ledger.stopped or (stop.requested and not self.sent):
                        self._save(self.next_step)
                        if stop.requested and self.next_step > first:
                            when = f"after {format_steps(self.next_step, num_steps)}"
                            saved = f"Saved the weights and the optimizer state of {self.config.run_name}"
                            print_notice(f"{saved} {when}.")
                        return True
                return False

            for steps in self.schedule.segments(first):
                if self.ledger.stopped or run_segment(self.config.granularity, steps, run_all):
                    stop.raise_if_requested()  # outside of the segment's task, which would fail or crash
                    break
            self._check_last_weights(num_steps)
            return self.checkpoints.wait() if self.ledger.stopped else self.checkpoints.finish()

    def _step(self, step: int, stop: StopRequest) -> dict[str, float] | None:
        """Run one step and start the next; return the step's metrics, or None if a stop ends the run before it."""
        self.run.directory.check_writer()  # a process that lost the run sends no further updates
        prepared, forward, sent = self.prepared, self.forward, self.sent
        assert prepared is not None
        if prepared and not self.source.sampled:
            # Datasets are stateful and not thread-safe: the next batch is loaded only after this one.
            prepared[0].batch.result()
        # Evaluators share the tokenizer of the next batch, which is not thread-safe either.
        # A stop waits for a step whose rollouts are sampled already, which would be lost.
        self.ledger.charge_others()
        metrics = self.evaluation.run(step, None if self.source.sampled else stop)
        self.ledger.charge_metered()
        if not self.source.sampled:
            if stop.requested and sent is None:
                self._charge_stopped(step, prepared)
                return None
            self._prepare(step + 1)

        if sent is None:
            sent = self._send_step(step, prepared, forward)
        if self.source.sampled:
            self._prepare_samples(step + 1, prepared, stop)
        else:
            self._send_ahead(step + 1, stop)

        if sent.batches:
            metrics |= self._read_responses(step, sent)
        ends = bool(self.ledger.stopped or stop.requested)
        self.ledger.charge_step(step, self.source, self.candidates, ends=ends)
        if self.candidates:
            metrics |= self.candidates.take_metrics(step)
        metrics |= self.guard.metrics(step) | self.ledger.end_step() | self.schedule.metrics(step)
        metrics |= self.times.end_step(metrics)
        self.run.directory.check_writer()  # a process that lost the run logs nothing either
        call(log_metrics, self.run.log, step, opaque_argument(metrics))
        self.watch.check_step(step, metrics, is_first=step == self.first_step)
        call_step_callback(step, metrics, stop)
        if sent.save:
            self.unchecked.append((sent.save, self._state(step + 1, sent.elapsed_tokens)))
        self.next_step = step + 1
        self.checkpoints.raise_if_failed()
        if self.source.sampled:
            self._request_forward(step + 1)
        return metrics

    def _charge_stopped(self, step: int, prepared: Sequence[PreparedBatch]) -> None:
        """Charge an evaluation after which a stop ends the run, and log the cost, which a restart continues from."""
        if prepared and prepared[0].reference:
            prepared[0].reference.result()
        self.ledger.charge_step(step, self.source, self.candidates, ends=True)
        self.run.log.log_unfinished(step, self.ledger.metrics())

    def _prepare(self, step: int) -> None:
        """Start loading the batch, reference logprobs and features of a step; a skipped step has none."""
        if step >= self.schedule.num_steps:
            self.prepared = None
        elif step in self.guard.skipped_steps:
            self.prepared = ()
        else:
            batches = self.source.load(step, self.run.client)
            if self.objective.has_open_choice:
                can_sample, first = self.candidates is not None, batches[0].result()
                choose_estimators(self.run, self.config, self.objective, first, can_sample=can_sample)
            passes = num_passes(self.objective, step, self.config.guards.needs_forward_pass)
            at = StepPosition(step, self.schedule.num_steps, 1 / self.source.num_minibatches)
            reference = self.reference if self.objective.needs_at("ref_logprobs", step) else None
            self.prepared = [
                prepare_batch(batch, self.objective, reference, self.executor, at, passes) for batch in batches
            ]
            if self.candidates and self.candidates.settings.overlap:
                self._prepare_candidates(step)

    def _prepare_samples(self, step: int, last: Sequence[PreparedBatch], stop: StopRequest) -> None:
        """Start the rollouts of a step, unless the run stops or its budget does not cover a step like the last one."""
        self.prepared = None
        if step == self.schedule.num_steps or stop.requested:
            return
        batches = [minibatch.batch.result() for minibatch in last]
        if self.ledger.covers(step, *self.expected_tokens.of_rollouts(step, batches)):
            self._prepare(step)

    def _prepare_candidates(self, step: int) -> None:
        """Start to sample candidates for the prepared batch of a step, from the weights after the updates sent so far.

        The candidates are one more minibatch of the step's update. Only the terms that need them are evaluated on it.
        """
        if not (self.candidates and self.prepared and self.expected_tokens.samples_candidates(step)):
            return
        at = StepPosition(step, self.schedule.num_steps, 1 / self.source.num_minibatches, on_candidates=True)
        prompts = self.prepared[0].batch
        batch = self.candidates.start(step, prompts, self.run.client)
        candidates = prepare_batch(batch, self.objective, None, self.executor, at, passes=2)
        self.prepared = [*self.prepared, replace(candidates, prompts=prompts)]

    def _request_forward(self, step: int) -> None:
        """Enqueue the forward pass of the prepared step, if it needs one, unless the budget ends the run before it."""
        self.forward = None
        if not self.prepared:
            return
        prepared = self.prepared[0]
        batch = self._wait_for_batch(prepared)
        needs_logprobs = self.step_objective.needs_logprobs(prepared)
        num_minibatches = sum(not minibatch.is_candidates for minibatch in self.prepared)
        if self.candidates:
            self.ledger.add_sampled(self.candidates.take_sampled(step - 1))
        expected = self.expected_tokens.of_step(step, batch, num_minibatches, needs_logprobs=needs_logprobs)
        if not self.ledger.covers(step, *expected):
            if prepared.reference and not self.source.sampled:
                prepared.reference.result()  # the reference already scores the batch, which has to be paid for
                self.ledger.charge_reference(step)
            self.prepared = None
        elif needs_logprobs:
            self.forward = self._enqueue_forward(batch)
        if self.prepared and self.candidates and not self.candidates.settings.overlap:
            self._prepare_candidates(step)

    def _send_ahead(self, step: int, stop: StopRequest) -> None:
        """Send the requests of a step that do not depend on the responses to the previous step."""
        self._request_forward(step)
        # An update without a forward pass is sent while the service computes the previous update. It waits if an
        # evaluation or a stop needs the weights in between, or if the metrics of the previous update set the weight of
        # a term.
        has_candidates = any(prepared.is_candidates for prepared in self.prepared or ())
        waits = self.forward is not None or has_candidates or bool(self.objective.targets)
        pipelined = not waits and not self.schedule.evaluates_before(step) and not stop.requested
        self.sent = self._send_step(step, self.prepared, None) if self.prepared is not None and pipelined else None

    def _send_step(self, step: int, prepared: Sequence[PreparedBatch], forward: PendingOutput | None) -> SentStep:
        """Send the updates of a step, followed by a save if one is due."""
        batches: list[SentBatch] = []
        checked: Iterable[tuple[PreparedBatch, Linearized | None]] = self._check_minibatches(step, prepared, forward)
        if self.config.guards.needs_forward_pass:
            checked = list(checked)
            if step in self.guard.skipped_steps:
                checked = []  # sent alone, the first minibatch would leave its gradient to the next update
                self.source.skip(step)
        # A step may have several updates. Candidates are one more minibatch of its only update.
        num_per_update = self.source.num_minibatches + sum(minibatch.is_candidates for minibatch in prepared)
        for number, (minibatch, linearized) in enumerate(checked, start=1):
            # Without a gradient, an optimizer step would still move the weights by its momentum.
            trains_terms = self.objective.trains_terms(step, self.schedule.num_steps)
            is_only_scored = not (trains_terms or self.source.teaches(step))
            if is_only_scored:
                update = PendingUpdate(self._enqueue_forward(minibatch.batch.result()), None)
            else:
                update = self._send_batch(minibatch, linearized, is_last=number % num_per_update == 0)
            batches.append(SentBatch(minibatch, update, linearized, is_only_scored))
            self.cadence.num_tokens += 0 if minibatch.is_candidates else minibatch.batch.result().num_tokens
        effect_passes: list[PendingOutput] = []
        if self.objective.measures_effects(step):
            effect_passes = [self._enqueue_forward(sent.prepared.batch.result()) for sent in batches]
        return SentStep(batches, effect_passes, self._request_save(step + 1), self.cadence.num_tokens)

    def _wait_for_batch(self, prepared: PreparedBatch) -> Batch:
        """Wait for a minibatch; broken weights may show first when the service samples from them."""
        with self.guard.checked_responses(prepared.at.step), self.times.waiting_for("batch"):
            return prepared.batch.result()

    def _check_minibatches(
        self, step: int, prepared: Sequence[PreparedBatch], forward: PendingOutput | None
    ) -> Iterator[tuple[PreparedBatch, Linearized | None]]:
        """Yield each minibatch with its checked linearized objective, or with None if it needs no forward pass.

        The iterator ends as soon as the guard skips the step.
        """
        for minibatch in prepared:
            batch = self._wait_for_batch(minibatch)
            if minibatch is not prepared[0]:
                forward = self._enqueue_forward(batch) if self.step_objective.needs_logprobs(minibatch) else None
            linearized = None
            if forward:
                compute = partial(self._linearize, minibatch, forward)
                linearized = self.guard.check(step, compute, checks_spike=not minibatch.is_candidates)
                if linearized is None:
                    return
                self._record_saves()
            yield minibatch, linearized

    def _request_save(self, step: int) -> PendingCheckpoint | None:
        """Enqueue a save of the weights before a step; return None if no save is due."""
        is_final = step == self.schedule.num_steps
        if not is_final and not self.cadence.is_due(step, self.ledger.hours):
            return None
        self.cadence.count_from_here(self.ledger.hours)
        return self.checkpoints.enqueue(step, final=is_final, kind=self.config.checkpoint_kind)

    def _send_batch(self, prepared: PreparedBatch, linearized: Linearized | None, *, is_last: bool) -> PendingUpdate:
        """Enqueue the gradient of a minibatch and, after the last one of an update, its optimizer step."""
        client, at, batch = self.run.client, prepared.at, prepared.batch.result()
        adam = self.config.adam.params(self.schedule.learning_rate_at(at.step)) if is_last else None
        loss = None if linearized else self.step_objective.service_loss(prepared)
        if not prepared.is_candidates:
            self.last_batch = batch
        self.ledger.add(batch.num_tokens)
        if loss:
            weight_of = self.objective.factors(batch, at.step, at.num_steps, at.share)
            return enqueue_one_pass_update(client, batch, prepared.outputs(), loss, weight_of, adam)
        return enqueue_update(client, batch, linearized.loss_weights_DT if linearized else batch.weights_DT, adam)

    def _read_responses(self, step: int, sent_step: SentStep) -> dict[str, float]:
        """Wait for the responses to the updates of a step; return the step's metrics."""
        metrics: dict[str, float] = {}
        linearized_batches: list[Linearized] = []
        trained: list[TrainedBatch] = []
        before: list[Tensor] = []
        for sent in sent_step.batches:
            update, linearized, batch = sent.update, sent.linearized, sent.prepared.batch.result()
            with self.guard.checked_responses(step):
                with self.times.waiting_for("forward_backward"):
                    outputs = call(forward_backward, update.forward_backward, opaque_argument(batch))
                with self.times.waiting_for("optim_step"):
                    metrics |= call(optim_step, update.optim_step) if update.optim_step else {}
            self.guard.check_metrics(step, metrics)
            if linearized is None:
                linearized = self.guard.check(step, partial(self.step_objective.measure, sent, outputs.logprobs_DT))
                assert linearized is not None, "a batch that was sent is never skipped"
                self._record_saves()
            linearized_batches.append(linearized)
            before.append(outputs.logprobs_DT)
            if not sent.prepared.is_candidates:
                trained.append(TrainedBatch(batch, outputs.logprobs_DT, linearized.by_datum))
        self.contents.add(step, [minibatch.batch for minibatch in trained], sampled=self.source.sampled)
        joined = join_metrics(linearized_batches)
        if sent_step.effect_passes:
            with self.guard.checked_responses(step):
                changes = sent_step.changes(before)
            joined |= measure_effects(linearized_batches, changes)
        logprobs_DT = torch.cat([minibatch.logprobs_DT for minibatch in trained])
        weights_DT = torch.cat([minibatch.batch.weights_DT for minibatch in trained])
        num_tokens = sum(minibatch.batch.num_tokens for minibatch in trained)
        of_update: dict[str, float] = {"num_tokens": num_tokens}
        if not weights_cancel(weights_DT):
            of_update["train_mean_nll"] = compute_mean_nll(logprobs_DT, weights_DT)
        of_source = self.source.metrics(step, trained, joined)
        return metrics | of_source | joined | self.objective.observe(step, joined) | of_update

    def _linearize(self, prepared: PreparedBatch, forward: PendingOutput) -> Linearized:
        """Wait for a forward pass and linearize the objective for the update."""
        with self.times.waiting_for("forward"):
            outputs = call(forward_logprobs, forward, opaque_argument(prepared.batch.result()))
        return self.step_objective.linearize(prepared, outputs.logprobs_DT)

    def _enqueue_forward(self, batch: Batch) -> PendingOutput:
        self.ledger.add(batch.num_tokens)
        return enqueue_forward(self.run.client, batch)

    def _save(self, step: int) -> None:
        """Save the weights and the optimizer state before a step, unless they are already saved."""
        if self.checkpoints.state_step != step:
            save = self.checkpoints.enqueue(step, final=False, kind="state")
            self.unchecked.append((save, self._state(step, self.cadence.num_tokens)))
        self._check_last_weights(step)
        self.checkpoints.wait()

    def _check_last_weights(self, step: int) -> None:
        """Run one more forward pass over the last batch, because no later step checks these weights.

        After the last step of the run, then evaluate the final weights, and record their checkpoint after that, so that
        `keep_best` can choose it.
        """
        if self.unchecked and self.last_batch:
            with self.guard.checked_responses(step):
                forward = self._enqueue_forward(self.last_batch)
                call(forward_logprobs, forward, opaque_argument(self.last_batch))
        self.ledger.add_sampled(self.source.stop_sampling())
        if self.unchecked and step == self.schedule.num_steps:
            metrics = self.evaluation.run(step)
            self.ledger.charge_reference(step)
            self.ledger.charge_metered()
            call(log_metrics, self.run.log, step, opaque_argument(metrics | self.ledger.metrics()))
            self.watch.check_end(step, metrics)
        elif self.unchecked:
            self.run.log.log_unfinished(step, self.ledger.metrics())  # with the tokens of this pass
        self._record_saves()

    def _record_saves(self) -> None:
        """Record the saves of weights that a response has confirmed, so that no checkpoint contains broken weights."""
        if self.unchecked and self.candidates:
            self.candidates.wait_until_stored()
        for save, state in self.unchecked:
            save_cache(self.objective.runner.cache, self.run.directory)
            if self.reference:
                save_cache(self.reference.cache, self.run.directory, REFERENCE_NAME)
            self.checkpoints.record(save, state | {"spent": self.ledger.state()})
        self.unchecked.clear()

    def _state(self, step: int, elapsed_tokens: int) -> dict[str, Any]:
        """Return the state that a checkpoint before a step records in addition to the weights."""
        state = {"objective": self.objective.state(), "guard": self.guard.state(), "source": self.source.state(step)}
        own = {"elapsed_tokens": elapsed_tokens, CONTENTS_KEY: self.contents.state(), "alerts": self.watch.state()}
        return state | own

    def _restore(self, start: CheckpointRecord | None) -> None:
        """Create guard, watch, ledger and cadence, with their state in a checkpoint, and start the data source."""
        config, state = self.config, start.extra if start else {}
        self.objective.restore(state.get("objective", {}))
        keep_recorded_conventions(self.objective, self.run.directory)
        self.guard = Guard(config.guards, config.run_name, self.run.directory, self.run.log, self.objective)
        self.guard.restore(state.get("guard", {}))
        self.watch = RunWatch(self.run, config, self.objective, self.source, state.get("alerts", {}))
        self.ledger = RunLedger(self.run, config, self.reference, state.get("spent", {}))
        self.cadence = CheckpointCadence(config, state)
        self.next_step = self.first_step
        self.source.begin(self.first_step, self.schedule.num_steps, state.get("source", {}))
