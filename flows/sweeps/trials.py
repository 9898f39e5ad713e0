"""The trials of a sweep: so many at once, each in as many attempts as it may have, and what it came to."""

from __future__ import annotations

import math
import queue
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, Protocol

from tqdm import tqdm

from blocks.errors import TinkerFlowsError
from flows.config import RunConfig
from flows.stop import Stop, listening_for_stop
from flows.sweeps.plan import SweepPlan
from flows.sweeps.pruning import Pruning
from flows.sweeps.record import SweepLog, last_values
from flows.sweeps.schedule import Schedule
from flows.sweeps.trial_process import End
from tasks.trials import Point, Trial, Trials

CANCELLED = "It was cancelled before its end."


class Runner(Protocol):
    """What runs one trial at a time."""

    def run(self, config: RunConfig, watch: Callable[[int, Mapping[str, float]], str]) -> End: ...
    def ask_to_stop(self) -> None: ...
    def close(self, *, kill: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class Sweeping:
    """A sweep under way: what its trials need."""

    plan: SweepPlan
    log: SweepLog
    base_url: str
    pruning: Pruning | None
    new_runner: Callable[[], Runner]

    def run(self, runners: queue.SimpleQueue[Runner], point: Point, seed: int) -> Trial:
        """Run a trial to its end, in as many attempts as it may have."""
        name = self.plan.trial_name(point.number, seed)
        trial = Trial(point.number, seed, name, "failed")
        runner = runners.get()
        try:
            config = self.plan.config_of(point.values, name, seed)
            tags = config.mlflow_tags | self.log.tags_of(self.plan.config.run_name, point.number)
            config = config.model_copy(update={"base_url": self.base_url, "mlflow_tags": tags})
            for left in range(self.plan.config.retries, -1, -1):
                started = time.monotonic()
                end, pruned = self._attempt(runner, config)
                trial = replace(trial, seconds=time.monotonic() - started)
                if end.how != "failed" or not end.may_pass or not left:
                    break
                tqdm.write(f"{name} is tried again: {end.reason}", file=sys.stderr)
            else:
                raise AssertionError("unreachable: the last attempt ends the loop")
            if end.how == "stopped" and not pruned:
                return replace(trial, reason=CANCELLED)
            return self._as_trial(trial, end)
        except Exception as error:  # noqa: BLE001  # whatever it is, the other trials go on
            known = isinstance(error, TinkerFlowsError | ValueError)
            return replace(trial, reason=str(error) if known else f"{type(error).__name__}: {error}")
        finally:
            runners.put(runner)

    def _attempt(self, runner: Runner, config: RunConfig) -> tuple[End, bool]:
        """One attempt, and whether it was asked to stop because others are better."""
        name, metric = config.run_name, self.plan.config.metric
        pruned = ""
        if self.pruning:
            self.pruning.begin(name, self.log.curve(self.log.trial(name), metric))

        def watch(step: int, metrics: Mapping[str, float]) -> str:
            nonlocal pruned
            if self.pruning and metric in metrics and self.pruning.should_stop(name, step, metrics[metric]):
                pruned = f"Pruned at step {step}, where its {metric} was {metrics[metric]:.4g}."
            return pruned

        try:
            end = runner.run(config, watch)
        except BaseException:
            if self.pruning:
                self.pruning.end(name, None, pruned=False)
            raise
        was_pruned = end.how == "stopped" and bool(pruned)
        if self.pruning:
            value = last_values(self.log.trial(name)).get(metric) if end.how == "completed" else None
            self.pruning.end(name, value, pruned=was_pruned)
        return (replace(end, reason=pruned) if was_pruned else end), was_pruned

    def _as_trial(self, trial: Trial, end: End) -> Trial:
        metric = self.plan.config.metric
        run = self.log.trial(trial.run_name)
        values = last_values(run)
        trial = replace(trial, mlflow_run_id=run.info.run_id if run else "", metrics=values, reason=end.reason)
        if end.how == "failed":
            return trial
        value = values.get(metric)
        if value is None or not math.isfinite(value):
            got = f"it is {value}" if value is not None else f"there are {', '.join(sorted(values)[:20])}"
            return replace(trial, reason=f"It has no value of the metric {metric!r}; {got}.")
        status = "pruned" if end.how == "stopped" else "completed"
        return replace(trial, status=status, value=value, curve=self.log.curve(run, metric))


def run_trials(sweeping: Sweeping, schedule: Schedule, concurrency: int) -> None:
    """Run every trial that is left, so many at once; a stop lets those under way save what they have, and ends all.

    Raises:
        KeyboardInterrupt, TerminationSignal, CancelledInTheUI: somebody asked the sweep to stop.
    """
    _replay(sweeping.pruning, schedule.trials)
    with listening_for_stop() as stop:
        with _runners(sweeping, min(concurrency, schedule.num_left)) as runners, _bar(schedule, sweeping.plan) as bar:
            _run_all(sweeping, schedule, runners, stop, bar)
        stop.obey()


def _run_all(sweeping: Sweeping, schedule: Schedule, runners: list[Runner], stop: Stop, bar: tqdm[NoReturn]) -> None:
    idle: queue.SimpleQueue[Runner] = queue.SimpleQueue()
    for runner in runners:
        idle.put(runner)
    running: set[Future[Trial]] = set()
    with ThreadPoolExecutor(len(runners), thread_name_prefix="trial") as threads, _killed_on_error(runners):
        told = False
        while True:
            while len(running) < len(runners) and not stop.asked and (taken := schedule.take()):
                running.add(threads.submit(copy_context().run, partial(sweeping.run, idle, *taken)))
            if not running:
                return
            done, running = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            for trial in (each.result() for each in done):
                if not (stop.asked and trial.reason == CANCELLED):  # which the sweep itself is, and goes on with
                    schedule.end(trial)
                    _tell(bar, schedule, trial)
            if stop.asked and not told:
                told = True
                _ask_to_stop(runners)


def _ask_to_stop(runners: Sequence[Runner]) -> None:
    for runner in runners:
        runner.ask_to_stop()


@contextmanager
def _killed_on_error(runners: Sequence[Runner]) -> Iterator[None]:
    """What is not to be saved is not to be waited for."""
    try:
        yield
    except BaseException:
        for runner in runners:
            runner.close(kill=True)
        raise


def _replay(pruning: Pruning | None, trials: Trials) -> None:
    """Let a new study know what the finished trials came to."""
    for trial in trials.ended.values():
        if pruning and trial.status != "failed":
            pruning.begin(trial.run_name, trial.curve)
            pruning.end(trial.run_name, trial.value, pruned=trial.status == "pruned")


@contextmanager
def _runners(sweeping: Sweeping, num: int) -> Iterator[list[Runner]]:
    runners = [sweeping.new_runner() for _ in range(num)]
    try:
        yield runners
    finally:
        for runner in runners:
            runner.close()


def _bar(schedule: Schedule, plan: SweepPlan) -> tqdm[NoReturn]:
    done = schedule.num_trials - schedule.num_left
    if done:
        tqdm.write(f"Resumed {plan.config.run_name}: {done} of {schedule.num_trials} trials are done.", file=sys.stderr)
    return tqdm(desc=plan.config.run_name, initial=done, total=schedule.num_trials, unit="trial", dynamic_ncols=True)


def _tell(bar: tqdm[NoReturn], schedule: Schedule, trial: Trial) -> None:
    if trial.status == "failed":
        tqdm.write(f"{trial.run_name} failed: {trial.reason}", file=sys.stderr)
    statuses = [each.status for each in schedule.trials.ended.values()]
    bar.set_postfix({name: statuses.count(name) for name in ("pruned", "failed") if name in statuses}, refresh=False)
    bar.update()
