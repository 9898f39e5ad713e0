"""Runner of the terms of an objective with their configured execution."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict

import torch

from objectives.batch import Batch, Outputs
from objectives.errors import ExecutionError, ObjectiveError
from objectives.evaluate import Evaluation, evaluate_term, failure, prepare_features
from objectives.event_loop import TermLoop
from objectives.execution.limit import LimitedThreads
from objectives.execution.process import TermProcess
from objectives.feature_cache import FeatureCache
from objectives.term import Regularizer, version_of

FUNCTIONS: dict[str, Callable[..., Any]] = {"preparing": prepare_features, "evaluating": evaluate_term}

Call = Callable[..., Any]
"""Function with the parameters doing, regularizer and arguments; runs ``FUNCTIONS[doing](regularizer, *arguments)``."""


class LastValue(TypedDict):
    """Value and metrics of the last successful evaluation of a term."""

    value: float
    metrics: dict[str, float]


class TermRunner:
    """Thread-safe runner of `prepare_features` and `evaluate_term` with each term's execution and time limit.

    - ``task_runner``, ``thread`` and ``inline``: on the calling thread, which is one of several except under
      ``inline``. With a time limit, in a separate thread, which is abandoned at the limit.
    - ``async``: on the runner's event loop; cancelled at the limit.
    - ``process``: in a dedicated process, killed at the limit. A term has two processes, so that preparing the next
      batch does not delay evaluating the current one.

    `prepare` and `evaluate` accept another function for the call, such as one that sends it to a cluster.

    Attributes:
        cache: features of terms declared with `per_datum`.
    """

    def __init__(self) -> None:
        self.cache = FeatureCache()
        self._threads = LimitedThreads()
        self._loop = TermLoop()
        self._processes: dict[tuple[str, str], TermProcess] = {}
        self._lock = threading.Lock()
        self._last: dict[str, LastValue] = {}

    def state(self) -> dict[str, LastValue]:
        """Return the state for resuming a run: the last values and metrics of terms with ``on_error: last``."""
        return dict(self._last)

    def restore(self, state: Mapping[str, LastValue]) -> None:
        """Restore a state; an empty state resets."""
        self._last = dict(state)

    def prepare(self, regularizer: Regularizer, batch: Batch, call: Call | None = None) -> object:
        """Run `prepare_features`.

        Raises:
            ObjectiveError: see `prepare_features`; or the term exceeds its time limit, or is declared `per_datum` and
                its features do not fit (`FeatureCache.features`).
        """
        term = regularizer.term
        if term.prepare is None:
            return None
        prepare = partial(self._run, call or self.call, "preparing", regularizer)
        is_per_datum = version_of(term.prepare) is not None
        return self.cache.features(regularizer, batch, prepare) if is_per_datum else prepare(batch)

    def evaluate(
        self,
        regularizer: Regularizer,
        outputs: Outputs,
        batch: Batch,
        first_step: bool,
        call: Call | None = None,
    ) -> Evaluation:
        """Run `evaluate_term`.

        Raises:
            ObjectiveError: see `evaluate_term`; or the term exceeds its time limit.
        """
        evaluation = self._run(call or self.call, "evaluating", regularizer, outputs, batch, first_step)
        if regularizer.on_error == "last":
            self._last[regularizer.name] = {"value": evaluation.value, "metrics": evaluation.metrics}
        return evaluation

    def settle(
        self, regularizer: Regularizer, outputs: Outputs, evaluate: Callable[[], Evaluation]
    ) -> tuple[Evaluation | None, ObjectiveError | None]:
        """Apply a term's ``on_error`` to an evaluation.

        Returns:
            The evaluation, and None. If the term failed: its last value without gradient, or None under ``skip`` or
            without an earlier value, and the error.

        Raises:
            ObjectiveError: the term failed, and its ``on_error`` is ``raise``.
        """
        try:
            return evaluate(), None
        except ObjectiveError as error:
            if regularizer.on_error == "raise":
                raise
            return self._stand_in(regularizer, outputs), error

    def close(self) -> None:
        """End the processes and the event loop of the terms."""
        self._loop.close()
        with self._lock:
            for process in self._processes.values():
                process.close()
            self._processes.clear()

    def call(self, doing: str, regularizer: Regularizer, *arguments: object) -> Any:
        """Run ``FUNCTIONS[doing](regularizer, *arguments)`` with the execution and the time limit of the term.

        Raises:
            ObjectiveError: the function raised.
            ExecutionError: the call exceeded the time limit, or the term's process failed (`TermProcess.call`).
        """
        if regularizer.execution == "process":
            return self._process_of(regularizer, doing).call(doing, regularizer, *map(without_datums, arguments))

        def work() -> Any:
            return self._loop.call(FUNCTIONS[doing], regularizer, *arguments)

        if regularizer.execution in ("task_runner", "thread") and regularizer.timeout_s is not None:
            return self._threads.run(f"{regularizer.name} {doing}", work, regularizer.timeout_s)
        return work()

    def _stand_in(self, regularizer: Regularizer, outputs: Outputs) -> Evaluation | None:
        """Return the last value of a failed term without gradient; None under ``skip`` or without an earlier value.

        The last gradient belongs to the logprobs of another batch and cannot be reused.
        """
        if regularizer.name not in self._last:
            return None
        last = self._last[regularizer.name]
        gradient_DT = torch.zeros_like(outputs.logprobs_DT, requires_grad=False)
        return Evaluation(regularizer.name, last["value"], gradient_DT, last["metrics"])

    def _run(self, call: Call, doing: str, regularizer: Regularizer, *arguments: object) -> Any:
        try:
            return call(doing, regularizer, *arguments)
        except ExecutionError as error:
            raise failure(regularizer, doing, error) from error

    def _process_of(self, regularizer: Regularizer, doing: str) -> TermProcess:
        with self._lock:
            key = (regularizer.name, doing)
            if key not in self._processes:
                self._processes[key] = TermProcess(regularizer.term)
            return self._processes[key]


def without_datums(argument: object) -> object:
    """Return a batch without its Tinker datums, which no other process needs; return other arguments unchanged."""
    return replace(argument, datums=None) if isinstance(argument, Batch) else argument
