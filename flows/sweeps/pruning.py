"""Early stopping of trials that are worse than the others at the same step."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import partial
from typing import Literal

import optuna
from optuna.pruners import BasePruner, MedianPruner, SuccessiveHalvingPruner
from optuna.trial import TrialState

from flows.sweeps.config import PruneConfig
from objectives.config.aliases import renamed_attribute

__getattr__ = partial(renamed_attribute, "flows.sweeps.pruning")  # names of release 0.1

optuna.logging.set_verbosity(optuna.logging.WARNING)

# Values of a metric, by step.
Curve = Sequence[tuple[int, float]]


class Pruner:
    """Optuna study that decides which trials of a sweep to stop; trials are identified by run name."""

    def __init__(self, config: PruneConfig, mode: Literal["min", "max"]) -> None:
        direction = "minimize" if mode == "min" else "maximize"
        self._study = optuna.create_study(pruner=_pruner(config), direction=direction)
        self._min_steps = config.min_steps
        self._trials: dict[str, tuple[optuna.Trial, set[int]]] = {}
        self._lock = threading.Lock()  # trials report concurrently

    def begin(self, name: str, curve: Curve) -> None:
        """Add a trial, or continue one that has not ended; `curve` has its values so far if it resumes."""
        with self._lock:
            if name not in self._trials:
                self._trials[name] = self._study.ask(), set()
        for step, value in curve:
            self.should_stop(name, step, value)

    def should_stop(self, name: str, step: int, value: float) -> bool:
        """Report the value of a trial at a step; return whether to stop the trial."""
        if step < self._min_steps or not math.isfinite(value):
            return False
        with self._lock:
            trial, steps = self._trials[name]
            if step not in steps:  # a trial that resumes from a checkpoint repeats the steps after it
                trial.report(value, step)
                steps.add(step)
            return trial.should_prune()

    def end(self, name: str, value: float | None, *, pruned: bool) -> None:
        """Report the end of a trial; nothing happens if it has ended.

        Args:
            value: last value of a completed trial; None or not finite for a failed trial, ignored for a pruned one.
        """
        if value is not None and not math.isfinite(value):
            value = None
        state = TrialState.PRUNED if pruned else TrialState.FAIL if value is None else TrialState.COMPLETE
        with self._lock:
            if name not in self._trials:
                return
            trial, _ = self._trials.pop(name)
            self._study.tell(trial, None if value is None or pruned else value, state=state)


def _pruner(config: PruneConfig) -> BasePruner:
    if config.rule == "median":
        return MedianPruner(n_startup_trials=config.min_trials, n_min_trials=config.min_trials)
    return SuccessiveHalvingPruner(min_resource=config.min_steps, reduction_factor=config.factor)
