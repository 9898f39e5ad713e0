"""Run the trials of a sweep concurrently, with retries and early stopping."""

from __future__ import annotations

import hashlib
import math
import queue
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from tqdm import tqdm

from blocks import TinkerService
from blocks.errors import TinkerFlowsError
from blocks.terminal import escape_terminal
from flows.config.base import ServiceConfig
from flows.config.flow_lookup import SweptConfig
from flows.monitoring.interrupts import StopRequest, deferred_interrupts
from flows.runs.blocks import open_service, service_url
from flows.sweeps.plan import SweepPlan
from flows.sweeps.protocols import Runner, TrialOutcome, measured_config
from flows.sweeps.pruning import Pruner
from flows.sweeps.record import SweepLog, last_values
from flows.sweeps.scheduler import Schedule
from tasks.reports.html import artifact_key
from tasks.sweeps.store import Point, Trial, Trials
from tasks.training.tracking.metric_names import logged_name

CANCELLED = "The trial was cancelled."


@dataclass(frozen=True, slots=True)
class TrialExecutor:
    """Executor of a sweep's trials, with retries and early stopping."""

    plan: SweepPlan
    log: SweepLog
    base_url: str
    pruning: Pruner | None
    new_runner: Callable[[], Runner]

    def run(self, runners: queue.SimpleQueue[Runner], point: Point, seed: int) -> Trial:
        """Run a trial to its end, with retries."""
        name = self.plan.trial_name(point.number, seed)
        # A cancelled trial also has the status `failed`; its reason is CANCELLED.
        trial = Trial(point.number, seed, name, "failed")
        runner = runners.get()
        try:
            config = self.plan.config_of(point.values, name, seed)
            tags = config.mlflow_tags | self.log.tags_of(self.plan.config.run_name, point.number)
            config = config.model_copy(update={"base_url": self.base_url, "mlflow_tags": tags})
            for retries_left in range(self.plan.config.retries, -1, -1):
                started = time.monotonic()
                outcome, pruned = self._attempt(runner, config)
                trial = replace(trial, seconds=time.monotonic() - started)
                if outcome.status != "failed" or not outcome.retryable or not retries_left:
                    break
                tqdm.write(escape_terminal(f"Retrying {name}: {outcome.reason}"), file=sys.stderr)
            else:
                raise AssertionError("unreachable: the last attempt ends the loop")
            if outcome.status == "stopped" and not pruned:
                return replace(trial, reason=CANCELLED)
            return self._as_trial(trial, outcome)
        except Exception as error:  # noqa: BLE001  # the other trials continue after any error
            known = isinstance(error, TinkerFlowsError | ValueError)
            return replace(trial, reason=str(error) if known else f"{type(error).__name__}: {error}")
        finally:
            if self.pruning:
                self.pruning.end(self.plan.measured_run(name), None, pruned=False)  # all attempts have failed
            runners.put(runner)

    def _attempt(self, runner: Runner, config: SweptConfig) -> tuple[TrialOutcome, bool]:
        """Run one attempt; return its outcome and whether it was pruned."""
        name, metric = measured_config(config).run_name, logged_name(self.plan.config.metric)
        pruned = ""
        if self.pruning:
            self.pruning.begin(name, self.log.curve(self.log.find_run(name), metric))

        def watch(step: int, metrics: Mapping[str, float]) -> str:
            nonlocal pruned
            if self.pruning and metric in metrics and self.pruning.should_stop(name, step, metrics[metric]):
                pruned = f"Pruned at step {step} with {metric} {metrics[metric]:.4g}."
            return pruned

        outcome = runner.run(config, watch)
        was_pruned = outcome.status == "stopped" and bool(pruned)
        if self.pruning and outcome.status != "failed":  # a failed attempt may be repeated
            value = last_values(self.log.find_run(name)).get(metric) if outcome.status == "completed" else None
            self.pruning.end(name, value, pruned=was_pruned)
        return (replace(outcome, reason=pruned) if was_pruned else outcome), was_pruned

    def _as_trial(self, trial: Trial, outcome: TrialOutcome) -> Trial:
        """Return the trial with its status and its logged metrics; a trial without a finite metric value has failed."""
        metric = logged_name(self.plan.config.metric)
        run = self.log.find_run(self.plan.measured_run(trial.run_name))
        values = last_values(run)
        trial = replace(trial, mlflow_run_id=run.info.run_id if run else "", metrics=values, reason=outcome.reason)
        if outcome.status == "failed":
            return trial
        value = values.get(metric)
        if value is None or not math.isfinite(value):
            details = (
                f"the value is {value}"
                if value is not None
                else f"its metrics are {', '.join(sorted(values)[:20]) or 'none'}"
            )
            if run is None:
                reason = outcome.reason.removesuffix(".")
                details = f"an earlier stage ended the trial: {reason}" if reason else "MLflow has no run of the trial"
            return replace(trial, reason=f"The trial has no finite value of the metric {metric!r}; {details}.")
        status = "pruned" if outcome.status == "stopped" else "completed"
        return replace(trial, status=status, value=value, curve=self.log.curve(run, metric))


def run_trials(executor: TrialExecutor, schedule: Schedule, concurrency: int) -> None:
    """Run all remaining trials. After a stop request, wait until the running ones have saved their state.

    Raises:
        KeyboardInterrupt, TerminationSignal, RunCancelled, Pause: The sweep was stopped.
    """
    _replay(executor.pruning, schedule.trials)
    with deferred_interrupts() as stop:
        with (
            _runners(executor, min(concurrency, schedule.num_remaining)) as runners,
            _bar(schedule, executor.plan) as bar,
        ):
            _run_all(executor, schedule, runners, stop, bar)
        stop.raise_if_requested()


def _run_all(
    executor: TrialExecutor, schedule: Schedule, runners: list[Runner], stop: StopRequest, bar: tqdm[NoReturn]
) -> None:
    """Run the remaining trials, one per runner at a time, until none is left or a stop is requested."""
    idle: queue.SimpleQueue[Runner] = queue.SimpleQueue()
    for runner in runners:
        idle.put(runner)
    running: set[Future[Trial]] = set()
    with ThreadPoolExecutor(len(runners), thread_name_prefix="trial") as threads, _killed_on_error(runners):
        stopping = False
        while True:
            while len(running) < len(runners) and not stop.requested and (item := schedule.next_trial()):
                running.add(threads.submit(copy_context().run, partial(executor.run, idle, *item)))
            if not running:
                return
            completed, running = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            for trial in (future.result() for future in completed):
                # A trial that was cancelled with the sweep runs again when the sweep resumes.
                if not (stop.requested and trial.reason == CANCELLED):
                    schedule.record(trial)
                    _show(bar, schedule, trial)
            if stop.requested and not stopping:
                stopping = True
                for runner in runners:
                    runner.request_stop()


@contextmanager
def _killed_on_error(runners: Sequence[Runner]) -> Iterator[None]:
    """Kill the runners if the block raises an error, instead of letting their trials save a checkpoint."""
    try:
        yield
    except BaseException:
        for runner in runners:
            runner.close(kill=True)
        raise


def _replay(pruning: Pruner | None, trials: Trials) -> None:
    """Report the finished trials to a new pruning study."""
    for trial in trials.finished.values():
        if pruning and trial.status != "failed":
            pruning.begin(trial.run_name, trial.curve)
            pruning.end(trial.run_name, trial.value, pruned=trial.status == "pruned")


@contextmanager
def _runners(executor: TrialExecutor, num: int) -> Iterator[list[Runner]]:
    runners = [executor.new_runner() for _ in range(num)]
    try:
        yield runners
    finally:
        for runner in runners:
            runner.close()


def _bar(schedule: Schedule, plan: SweepPlan) -> tqdm[NoReturn]:
    num_finished = schedule.num_trials - schedule.num_remaining
    if num_finished:
        text = f"Resumed {plan.config.run_name}: {num_finished} of {schedule.num_trials} trials are done."
        tqdm.write(escape_terminal(text), file=sys.stderr)
    return tqdm(
        desc=plan.config.run_name, initial=num_finished, total=schedule.num_trials, unit="trial", dynamic_ncols=True
    )


def _show(bar: tqdm[NoReturn], schedule: Schedule, trial: Trial) -> None:
    if trial.status == "failed":
        tqdm.write(escape_terminal(f"{trial.run_name} failed: {trial.reason}"), file=sys.stderr)
    statuses = [ended.status for ended in schedule.trials.finished.values()]
    bar.set_postfix({name: statuses.count(name) for name in ("pruned", "failed") if name in statuses}, refresh=False)
    bar.update()


@contextmanager
def shared_service(config: ServiceConfig, run_name: str, location: str) -> Iterator[str]:
    """Yield the `base_url` for all trials of a sweep; a local engine is started once and shared as a Prefect block.

    Raises:
        ServiceError: The engine did not start.
        ServiceLostError: The engine ended during the sweep.
    """
    if service_url(config.base_url):
        yield config.base_url
        return
    # The engine accepts only requests with its key; workers on this machine read the key from this Prefect block.
    name = artifact_key("sweep", f"{run_name[:40]}-{hashlib.sha256(location.encode()).hexdigest()[:12]}")
    with open_service(config) as service:
        service.save(name, overwrite=True)
        try:
            yield f"block:{name}"
        finally:
            with suppress(ValueError):  # already deleted
                TinkerService.delete(name)
