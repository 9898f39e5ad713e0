"""The loop over a data source, whatever its method: each step's requests are sent as early as they can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, cast

from tinker_cookbook.checkpoint_utils import CheckpointRecord
from tinker_cookbook.eval.evaluators import Evaluator

from blocks.errors import ConfigError
from flows.budget import Ledger, spent_before
from flows.checkpoints import Checkpoints
from flows.ended import forget_end, note_end
from flows.events import emit
from flows.granularity import run_segment, run_step
from flows.guards import Guard
from flows.one_pass import loss_of
from flows.plan import Plan
from flows.prices import price_of
from flows.progress import Progress
from flows.promote_if import check_measured
from flows.reference import open_reference
from flows.result import Ended, TrainResult, finish
from flows.run import Run
from flows.start import begin, first_step
from flows.step import Ahead, Forward, compute_linearized, enqueue_forward_ahead, load_ahead, measure, num_passes
from flows.stop import Stop, listening_for_stop
from flows.train_config import TrainConfig
from flows.warn import warn
from flows.watched import show_metrics
from objectives.batch import Batch, Outputs
from objectives.fused import check_trained
from objectives.linearize import Linearized
from objectives.losses import compute_mean_nll
from objectives.objective import Objective
from objectives.one_pass import OnePass, Uploaded
from objectives.regularizer import Regularizer
from tasks.checkpoint import PendingCheckpoint, step_of
from tasks.evaluate import HeldOutNLL, evaluate
from tasks.features import load_kept, save_kept
from tasks.forward import enqueue_forward, forward_logprobs
from tasks.metrics import log_metrics
from tasks.options import call, whole
from tasks.pairs import HeldOutPairs
from tasks.reference import REFERENCE_NAME, Reference
from tasks.source import Source
from tasks.update import PendingUpdate, enqueue_fused_update, enqueue_update, forward_backward, optim_step


@dataclass(frozen=True, slots=True)
class Sent:
    """A step whose update is under way, unless it is passed over, and the save behind it where one is due."""

    update: PendingUpdate | None
    linearized: Linearized | None
    saving: PendingCheckpoint | None


@dataclass(slots=True)
class Loop:
    """A run between two steps.

    Attributes:
        run, plan, source, objective, reference, evaluators, checkpoints, one_pass, guard, ledger: what stays the same.
        following: the next step, on its way; None behind the last one.
        forward: its forward pass, where it is asked for.
        sent: its update, where that is sent already.
        trained: the batch of the last update.
        unseen: the saves, each with the state of all else, of weights that nothing has looked at.
        ended: why the budget ends the run before the next step; empty where it does not.
        began: when the step before was done, by the clock of `perf_counter`.
    """

    run: Run
    plan: Plan
    source: Source
    objective: Objective
    reference: Reference | None
    evaluators: Sequence[Evaluator]
    checkpoints: Checkpoints
    one_pass: OnePass
    guard: Guard
    ledger: Ledger
    following: Ahead | None = None
    forward: Forward | None = None
    sent: Sent | None = None
    trained: Batch | None = None
    unseen: list[tuple[PendingCheckpoint, dict[str, Any]]] = field(default_factory=list)
    ended: str = ""
    began: float = field(default_factory=perf_counter)


def train(
    run: Run,
    config: TrainConfig,
    source: Source,
    objective: Objective,
    evaluators: Sequence[Evaluator],
    reference: Reference | None = None,
) -> TrainResult:
    """Run every step that is left, or that the budget allows, then leave a checkpoint and the report.

    Args:
        reference: of the terms that measure from one, where the flow has opened it.

    Raises:
        GuardError: a step was not fit to be trained on, and the config says what becomes of it.
        KeyboardInterrupt, TerminationSignal: somebody asked the run to stop; the steps that were begun are done and
            saved.
    """
    plan = Plan(config, source.steps_per_epoch)
    start = begin(run, config, plan.steps_per_epoch, plan.num_steps)
    plan = replace(plan, first=first_step(run.directory))
    load_kept(objective.runner.cache, run.directory)
    reference = reference or open_reference(run, config, objective)
    first = step_of(start) if start else 0
    checkpoints = Checkpoints(run, config, plan.steps_per_epoch, start)
    guard, ledger = _restore(run, config, objective, start)
    one_pass = OnePass(objective, run.session)
    loop = Loop(run, plan, source, objective, reference, evaluators, checkpoints, one_pass, guard, ledger)
    _load(loop, first)
    _ask(loop, first)
    if loop.ended and start is None:
        raise ConfigError(f"{loop.ended} Nothing is done yet: raise the budget.")
    with (
        Progress(config.run_name, first, plan.num_steps, run.log) as progress,
        listening_for_stop() as stop,
        checkpoints,
    ):

        def run_one(step: int) -> None:
            progress.advance(_step(loop, step, stop))

        def run_all(steps: range) -> None:
            for step in steps:
                run_step(config.granularity, step, run_one)
                if loop.ended or (stop.asked and not loop.sent):
                    _save(loop, step + 1)
                    stop.obey()
                    return

        for steps in plan.segments(first):
            if not loop.ended:
                run_segment(config.granularity, steps, run_all)
        _look_back(loop, plan.num_steps)
        last = checkpoints.settle() if loop.ended else checkpoints.finish()
    assert last is not None
    return finish(run, config.run_name, last, first, Ended(loop.ended, checkpoints.refused))


def _step(loop: Loop, step: int, stop: Stop) -> dict[str, float]:
    """Take a step, and start on the next one; the metrics of the step."""
    run, plan, objective = loop.run, loop.plan, loop.objective
    ahead, forward, sent = loop.following, loop.forward, loop.sent
    assert ahead is not None
    # Waited for before the next is loaded: a dataset has one place and one epoch.
    batch = forward.batch if forward else ahead.batch.result()
    # Before the next batch is loaded: evaluators share its tokenizer, which is not to be used by two threads.
    metrics = _evaluate(loop, step) if plan.evaluates_before(step) else {}
    if not loop.source.sampled:
        _load(loop, step + 1)

    if sent is None:
        linearized = None
        if forward:
            compute = partial(compute_linearized, objective, ahead, forward, plan.num_steps, step == 0)
            linearized = loop.guard.look(step, compute)
        if linearized:
            _seen(loop)
        sent = _send(loop, ahead, linearized)
    if loop.source.sampled:
        _load(loop, step + 1)
    else:
        _go_ahead(loop, step + 1, stop)

    if sent.update:
        metrics |= _answer(loop, ahead, batch, sent.update, sent.linearized)
    metrics |= loop.guard.metrics(step) | loop.ledger.end_step() | _progress(plan, step)
    began, loop.began = loop.began, perf_counter()
    metrics["time/step"] = loop.began - began
    call(log_metrics, run.log, step, whole(metrics))
    warn(run.log, plan.config.run_name, objective.watch.take_warnings())
    show_metrics(step, metrics, stop)
    if sent.saving:
        loop.unseen.append((sent.saving, _state(loop)))
    loop.checkpoints.check()
    if loop.source.sampled:
        _ask(loop, step + 1)
    return metrics


def _go_ahead(loop: Loop, step: int, stop: Stop) -> None:
    """Send what a step can be sent of before the answers to the one before it."""
    _ask(loop, step)
    # An update that waits for no forward pass is sent while the one before it is computed, except where an
    # evaluation or a stop has to find the weights between the two.
    pipelined = loop.following and not loop.forward and not loop.plan.evaluates_before(step) and not stop.asked
    loop.sent = _send(loop, loop.following, None) if loop.following and pipelined else None


def _restore(
    run: Run, config: TrainConfig, objective: Objective, start: CheckpointRecord | None
) -> tuple[Guard, Ledger]:
    """Go on with all that a checkpoint's record knows beside the weights."""
    if config.guards.looks_first and objective.backend == "server":
        raise ConfigError(
            "guards.skip looks at a forward pass before each update, and objective.backend is 'server', which is one "
            "pass: take backend 'auto', or another policy."
        )
    state = start.extra if start else {}
    objective.restore(state.get("objective", {}))
    guard = Guard(config.guards, run.directory, run.log, objective)
    guard.restore(state.get("guard", {}))
    price = price_of(config.model, config.base_url, config.budget.prices)
    ledger = Ledger(config.budget, price, spent_before(run.log, state.get("spent", {})))
    forget_end(run.log)
    return guard, ledger


def _state(loop: Loop) -> dict[str, Any]:
    return {"objective": loop.objective.state(), "guard": loop.guard.state()}


def _load(loop: Loop, step: int) -> None:
    """Start on what a step needs of the data, unless there is no such step."""
    passed_over = step in loop.guard.passed_over
    passes = 0 if passed_over else num_passes(loop.objective, step, loop.plan.config.guards.looks_first)
    if step >= loop.plan.num_steps:
        loop.following = None
        return
    batch = loop.source.load(step, loop.run.client)
    loop.following = load_ahead(batch, loop.objective, loop.reference, step, passes)


def _ask(loop: Loop, step: int) -> None:
    """Ask for the forward pass of the step that is loaded, if it needs one, and unless the budget ends the run."""
    loop.forward, ahead = None, loop.following
    if ahead is None:
        return
    batch = ahead.batch.result()
    fused = ahead.passes == 2 and _loss_of(loop, ahead) is not None
    loop.ledger.add(loop.reference.take_num_tokens() if loop.reference else 0)
    # And what it takes to look back at its update, and at the run's last weights.
    num_tokens = ((1 if fused else ahead.passes) + 1) * batch.num_tokens + _held_out_tokens(loop, step)
    num_tokens += _held_out_tokens(loop, step + 1) if step + 1 == loop.plan.num_steps else 0
    loop.ended = loop.ledger.end_before(step, num_tokens)
    if loop.ended:
        loop.following = None
        note_end(loop.run.log, loop.ended)
        emit("budget", loop.plan.config.run_name, {"step": step, **loop.ledger.state(), "message": loop.ended})
    elif ahead.passes == 2 and not fused:
        loop.forward = enqueue_forward_ahead(loop.run.client, ahead)
        loop.ledger.add(batch.num_tokens)


def _loss_of(loop: Loop, ahead: Ahead) -> Uploaded | None:
    """The loss that the service has for a step in one pass; None where the guards look at a forward pass first."""
    first = loop.plan.config.guards.looks_first
    return None if first else loss_of(loop.run, loop.one_pass, ahead.step, ahead.beside(), ahead.batch.result())


def _answer(
    loop: Loop, ahead: Ahead, batch: Batch, update: PendingUpdate, linearized: Linearized | None
) -> dict[str, float]:
    """Wait for the answers to an update; its metrics."""
    step = ahead.step
    with loop.guard.answers(step):
        outputs = call(forward_backward, update.forward_backward, whole(batch))
        metrics = call(optim_step, update.optim_step)
    loop.guard.check_metrics(step, metrics)
    if linearized is None:
        linearized = loop.guard.look(step, partial(_measure, loop, ahead, outputs, batch, update))
        assert linearized is not None, "what was sent is never skipped"
        _seen(loop)
    nll = compute_mean_nll(outputs.logprobs_DT, batch.weights_DT)
    metrics |= loop.source.metrics(step, batch, outputs.logprobs_DT, linearized.metrics)
    return metrics | linearized.metrics | {"train_mean_nll": nll, "num_tokens": batch.num_tokens}


def _measure(loop: Loop, ahead: Ahead, outputs: Outputs, batch: Batch, update: PendingUpdate) -> Linearized:
    """The metrics of a step that was one pass, and a check that it was trained on what they say."""
    linearized = measure(loop.objective, ahead, outputs, batch, loop.plan.num_steps, ahead.step == 0)
    check_trained(ahead.step, update.forward_backward.result().metrics["loss:sum"], linearized)
    return linearized


def _seen(loop: Loop) -> None:
    """Record what was saved of weights that have turned out fit: a checkpoint never holds others."""
    for saving, state in loop.unseen:
        save_kept(loop.objective.runner.cache, loop.run.directory)
        if loop.reference:
            save_kept(loop.reference.kept, loop.run.directory, REFERENCE_NAME)
        loop.checkpoints.record(saving, state | {"spent": loop.ledger.state()})
    loop.unseen.clear()


def _look_back(loop: Loop, step: int) -> None:
    """Look at weights that no step follows by one more forward pass, on the last batch they were trained on.

    Only then the final ones are evaluated, and recorded behind that, so that the best checkpoint may be the final one.
    """
    if loop.unseen and loop.trained:
        with loop.guard.answers(step):
            loop.ledger.add(loop.trained.num_tokens)
            call(forward_logprobs, enqueue_forward(loop.run.client, loop.trained), whole(loop.trained))
    if loop.unseen and step == loop.plan.num_steps:
        metrics = _evaluate(loop, step) if loop.plan.evaluates_before(step) else {}
        call(log_metrics, loop.run.log, step, whole(metrics | loop.ledger.metrics()))
    _seen(loop)


def _save(loop: Loop, step: int) -> None:
    """Save what the steps before this one made, where that is not done."""
    if not loop.plan.saves_before(step):
        loop.unseen.append((loop.checkpoints.enqueue(step, final=False), _state(loop)))
    _look_back(loop, step)
    loop.checkpoints.settle()


def _send(loop: Loop, ahead: Ahead, linearized: Linearized | None) -> Sent:
    """Send the update of a step, and right behind it the save that is due, before any later request."""
    plan, client, update, saving = loop.plan, loop.run.client, None, None
    step, batch = ahead.step, ahead.batch.result()
    if step not in loop.guard.passed_over:
        adam = plan.config.adam.at(plan.learning_rate_at(step))
        loss = None if linearized else _loss_of(loop, ahead)
        if loss:
            weight_of = partial(Regularizer.weight_at, step=step, num_steps=plan.num_steps)
            update = enqueue_fused_update(client, batch, ahead.beside(), loss, weight_of, adam)
        else:
            update = enqueue_update(client, batch, linearized.loss_weights_DT if linearized else batch.weights_DT, adam)
        loop.trained = batch
        loop.ledger.add(batch.num_tokens)
    if plan.saves_before(step + 1):
        saving = loop.checkpoints.enqueue(step + 1, final=step + 1 == plan.num_steps)
    return Sent(update, linearized, saving)


def _evaluate(loop: Loop, step: int) -> dict[str, float]:
    # Submitted, because an async task called by a synchronous flow is never run.
    loop.ledger.add(_held_out_tokens(loop, step))
    with loop.guard.answers(step):
        metrics = cast("dict[str, float]", evaluate.submit(loop.run.client, loop.evaluators, step).result())
    check_measured(loop.plan.config.promote_if, metrics)
    return metrics


def _held_out_tokens(loop: Loop, step: int) -> int:
    """The tokens that an evaluation before a step takes, as far as they are known: not what evaluators sample."""
    due = loop.plan.evaluates_before(step)
    return sum(each.num_tokens for each in loop.evaluators if due and isinstance(each, HeldOutNLL | HeldOutPairs))


def _progress(plan: Plan, step: int) -> dict[str, float]:
    return {
        "optim/lr": plan.learning_rate_at(step),
        "progress/epoch": step // plan.steps_per_epoch,
        "progress/done_frac": (step + 1) / plan.num_steps,
    }
