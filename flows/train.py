"""The loop over a data source, whatever its method: each step's requests are sent as early as they can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from flows.loop import Loop
from flows.pauses import short_pauses
from flows.pitfalls import warn_of_pitfalls
from flows.plan import Plan
from flows.prices import price_of
from flows.progress import Progress
from flows.promote_if import check_measured
from flows.reference import open_reference
from flows.result import Ended, TrainResult, finish
from flows.run import Run
from flows.start import begin, first_step
from flows.step import load_ahead, num_passes
from flows.stop import Stop, listening_for_stop
from flows.train_config import TrainConfig
from flows.updates import ask_forward, looks_ahead, read_answers, record_seen, send
from flows.warn import warn
from flows.watched import show_metrics
from objectives.objective import Objective
from objectives.one_pass import OnePass
from tasks.checkpoint import step_of
from tasks.evaluate import HeldOutNLL, evaluate
from tasks.features import load_kept
from tasks.forward import enqueue_forward, forward_logprobs
from tasks.metrics import log_metrics
from tasks.options import call, whole
from tasks.pairs import HeldOutPairs
from tasks.reference import Reference
from tasks.source import Source


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
    warn_of_pitfalls(run, config)
    load_kept(objective.runner.cache, run.directory)
    if reference is None and objective.needs("ref_logprobs"):
        reference = open_reference(run, config)
    first = step_of(start) if start else 0
    checkpoints = Checkpoints(run, config, plan.steps_per_epoch, start)
    guard, ledger = _restore(run, config, objective, start)
    source.begin(first, plan.num_steps, start.extra.get("source", {}) if start else {})
    one_pass = OnePass(objective, run.session)
    loop = Loop(run, plan, source, objective, reference, evaluators, checkpoints, one_pass, guard, ledger)
    _load(loop, first)
    _ask(loop, first)
    if loop.ended and start is None:
        raise ConfigError(f"{loop.ended} Nothing is done yet: raise the budget.")
    with (
        Progress(config.run_name, first, plan.num_steps, run.log) as progress,
        listening_for_stop() as stop,
        short_pauses(),
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
    parts, forward, sent = loop.following, loop.forward, loop.sent
    assert parts is not None
    if parts and not loop.source.sampled:
        # Waited for before the next is loaded: a dataset has one place and one epoch.
        parts[0].batch.result()
    # Before the next batch is loaded: evaluators share its tokenizer, which is not to be used by two threads.
    metrics = _evaluate(loop, step) if plan.evaluates_before(step) else {}
    if not loop.source.sampled:
        _load(loop, step + 1)

    if sent is None:
        sent = send(loop, step, parts, forward)
    if loop.source.sampled:
        _load(loop, step + 1)
    else:
        _go_ahead(loop, step + 1, stop)

    if sent.batches:
        metrics |= read_answers(loop, step, sent.batches)
    loop.ledger.add_sampled(loop.source.take_sampled())
    metrics |= loop.guard.metrics(step) | loop.ledger.end_step() | _progress(plan, step)
    began, loop.began = loop.began, perf_counter()
    metrics["time/step"] = loop.began - began
    call(log_metrics, run.log, step, whole(metrics))
    warn(run.log, plan.config.run_name, objective.watch.take_warnings())
    show_metrics(step, metrics, stop)
    if sent.saving:
        loop.unseen.append((sent.saving, _state(loop, step + 1)))
    loop.checkpoints.check()
    if loop.source.sampled:
        _ask(loop, step + 1)
    return metrics


def _go_ahead(loop: Loop, step: int, stop: Stop) -> None:
    """Send what a step can be sent of before the answers to the one before it."""
    _ask(loop, step)
    # An update that waits for no forward pass is sent while the one before it is computed, except where an
    # evaluation or a stop has to find the weights between the two.
    pipelined = not loop.forward and not loop.plan.evaluates_before(step) and not stop.asked
    loop.sent = send(loop, step, loop.following, None) if loop.following is not None and pipelined else None


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


def _state(loop: Loop, step: int) -> dict[str, Any]:
    """What a run needs to go on at a step beside the weights."""
    return {"objective": loop.objective.state(), "guard": loop.guard.state(), "source": loop.source.state(step)}


def _load(loop: Loop, step: int) -> None:
    """Start on what a step needs of the data, unless there is no such step."""
    if step >= loop.plan.num_steps:
        loop.following = None
    elif step in loop.guard.passed_over:
        loop.following = ()
    else:
        passes = num_passes(loop.objective, step, loop.plan.config.guards.looks_first)
        share = 1 / loop.source.num_minibatches
        loop.following = [
            load_ahead(batch, loop.objective, loop.reference, step, passes, share)
            for batch in loop.source.load(step, loop.run.client)
        ]


def _ask(loop: Loop, step: int) -> None:
    """Ask for the forward pass of the step that is loaded, if it needs one, and unless the budget ends the run."""
    loop.forward = None
    if not loop.following:
        return
    ahead = loop.following[0]
    batch = ahead.batch.result()
    looks = looks_ahead(loop, ahead)
    loop.ledger.add(loop.reference.take_num_tokens() if loop.reference else 0)
    # And what it takes to look back at its update, and at the run's last weights. Other minibatches are taken to be as
    # long as the first.
    num_tokens = (3 if looks else 2) * batch.num_tokens * len(loop.following)
    num_tokens += _held_out_tokens(loop, step)
    num_tokens += _held_out_tokens(loop, step + 1) if step + 1 == loop.plan.num_steps else 0
    loop.ended = loop.ledger.end_before(step, num_tokens)
    if loop.ended:
        loop.following = None
        note_end(loop.run.log, loop.ended)
        emit("budget", loop.plan.config.run_name, {"step": step, **loop.ledger.state(), "message": loop.ended})
    elif looks:
        loop.forward = ask_forward(loop, ahead)


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
    record_seen(loop)


def _save(loop: Loop, step: int) -> None:
    """Save what the steps before this one made, where that is not done."""
    if not loop.plan.saves_before(step):
        loop.unseen.append((loop.checkpoints.enqueue(step, final=False), _state(loop, step)))
    _look_back(loop, step)
    loop.checkpoints.settle()


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
