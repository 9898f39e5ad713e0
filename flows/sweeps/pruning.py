"""Pruning: whether a trial is worth going on with, by what the others had come to at the same step."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Literal

import optuna
from optuna.pruners import BasePruner, MedianPruner, SuccessiveHalvingPruner
from optuna.trial import TrialState

from flows.sweeps.config import PruneConfig

optuna.logging.set_verbosity(optuna.logging.WARNING)

# A metric by step.
Curve = Sequence[tuple[int, float]]


class Pruning:
    """The trials of a sweep as an optuna study that prunes them; each has its own name."""

    def __init__(self, config: PruneConfig, mode: Literal["min", "max"]) -> None:
        direction = "minimize" if mode == "min" else "maximize"
        self._study = optuna.create_study(pruner=_pruner(config), direction=direction)
        self._min_steps = config.min_steps
        self._trials: dict[str, tuple[optuna.Trial, set[int]]] = {}
        self._lock = threading.Lock()  # several trials log at once

    def begin(self, name: str, curve: Curve) -> None:
        """A trial begins, or goes on behind what it came to so far."""
        with self._lock:
            self._trials[name] = self._study.ask(), set()
        for step, value in curve:
            self.should_stop(name, step, value)

    def should_stop(self, name: str, step: int, value: float) -> bool:
        """Note what a trial came to at a step; whether that is too bad to go on."""
        if step < self._min_steps or not math.isfinite(value):
            return False
        with self._lock:
            trial, steps = self._trials[name]
            if step not in steps:  # a trial that goes on from a checkpoint comes by the steps behind it again
                trial.report(value, step)
                steps.add(step)
            return trial.should_prune()

    def end(self, name: str, value: float | None, *, pruned: bool) -> None:
        """A trial has ended, with its last value, or None where it failed."""
        state = TrialState.PRUNED if pruned else TrialState.FAIL if value is None else TrialState.COMPLETE
        with self._lock:
            trial, _ = self._trials.pop(name)
            self._study.tell(trial, None if value is None or pruned else value, state=state)


def _pruner(config: PruneConfig) -> BasePruner:
    if config.rule == "median":
        return MedianPruner(n_startup_trials=config.min_trials, n_min_trials=config.min_trials)
    return SuccessiveHalvingPruner(min_resource=config.min_steps, reduction_factor=config.factor)
