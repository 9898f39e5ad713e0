"""Progress of a run: step callback, progress bar, and the run's page in the Prefect UI."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from tqdm import tqdm

from flows.monitoring.artifacts import RunPage
from flows.monitoring.interrupts import StopRequest
from tasks.training.metrics import MetricsLog

# Receives each step and its metrics; returns a reason to stop the run, or an empty string.
StepCallback = Callable[[int, Mapping[str, float]], str]

_CALLBACK: ContextVar[StepCallback | None] = ContextVar("step_callback", default=None)


@contextmanager
def step_callback(callback: StepCallback) -> Iterator[None]:
    """Call a function after each step of the runs in this block; it may return a reason to stop the run."""
    token = _CALLBACK.set(callback)
    try:
        yield
    finally:
        _CALLBACK.reset(token)


def call_step_callback(step: int, metrics: Mapping[str, float], stop: StopRequest) -> None:
    """Pass the metrics of a step to the step callback, and cancel the run if it returns a reason."""
    callback = _CALLBACK.get()
    if callback and (reason := callback(step, metrics)):
        stop.cancel(reason)


class Progress:
    """Progress bar with the loss and the remaining time, and the run's page in the Prefect UI."""

    def __init__(self, run_name: str, first: int, num_steps: int, log: MetricsLog) -> None:
        self._page = RunPage(run_name, first, num_steps, log)
        if first:
            tqdm.write(f"Resumed {run_name} at step {first} of {num_steps}.", file=sys.stderr)
        self._bar = tqdm(desc=run_name, initial=first, total=num_steps, unit="step", dynamic_ncols=True, smoothing=0.1)

    def advance(self, metrics: Mapping[str, float]) -> None:
        """Count a finished step."""
        self._page.advance(metrics)
        labels = {"loss": "loss/total", "base": "loss/base", "nll": "train_mean_nll"}
        # A skipped step has none of these metrics.
        figures = {label: f"{metrics[key]:.3f}" for label, key in labels.items() if key in metrics}
        self._bar.set_postfix(figures, refresh=False)
        self._bar.update()

    def __enter__(self) -> Self:
        self._page.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._page.__exit__(kind, error, trace)
