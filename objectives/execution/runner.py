"""Runs the terms of an objective as their specs say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from objectives.batch import Batch, Outputs
from objectives.errors import ExecutionError, ObjectiveError
from objectives.evaluate import Evaluation, evaluate_term, failure, prepare_features
from objectives.execution.dask_tasks import TermTasks
from objectives.execution.limit import LimitedThreads
from objectives.execution.process import TermProcess
from objectives.execution.ray_actors import TermActor
from objectives.feature_cache import FeatureCache
from objectives.per_datum import version_of
from objectives.regularizer import Regularizer

T = TypeVar("T")

# The executions whose terms are elsewhere than in this process.
PLACES: dict[str, type[TermProcess | TermTasks | TermActor]] = {
    "process": TermProcess,
    "dask": TermTasks,
    "ray": TermActor,
}


class TermRunner:
    """`prepare_features` and `evaluate_term`, wherever the spec of each term says; safe to call from any thread.

    - ``inline`` and ``thread``: on the calling thread, which under ``thread`` is one of many; with a limit, in one
      more, which is given up when it takes too long.
    - ``async``: on the event loop, where it is cancelled when it takes too long.
    - ``process``: in a process of the term's own, which is killed when it takes too long. It has two, one for
      preparing ahead of the service and one for evaluating between two requests, so that neither waits for the other.
    - ``dask`` and ``ray``: on a worker of a cluster, which is killed when it takes too long.

    Attributes:
        cache: the features of what is prepared `per_datum`.
    """

    def __init__(self) -> None:
        self.cache = FeatureCache()
        self._threads = LimitedThreads()
        self._places: dict[tuple[str, str], TermProcess | TermTasks | TermActor] = {}
        self._lock = threading.Lock()
        self._last: dict[str, tuple[float, dict[str, float]]] = {}

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on with, as plain data: the last value and metrics of ``on_error: last``."""
        return {name: {"value": value, "metrics": metrics} for name, (value, metrics) in self._last.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; an empty one is the beginning."""
        self._last = {name: (each["value"], each["metrics"]) for name, each in state.items()}

    def prepare(self, regularizer: Regularizer, batch: Batch) -> Any:
        """As `prepare_features`.

        Raises:
            ObjectiveError: as `prepare_features` does, and for a term that takes longer than its limit.
        """
        term = regularizer.term
        if term.prepare is None:
            return None
        prepare = partial(self._run, "preparing", prepare_features, regularizer)
        return self.cache.features(regularizer, batch, prepare) if version_of(term.prepare) else prepare(batch)

    def evaluate(self, regularizer: Regularizer, outputs: Outputs, batch: Batch, first_step: bool) -> Evaluation:
        """As `evaluate_term`.

        Raises:
            ObjectiveError: as `evaluate_term` does, and for a term that takes longer than its limit.
        """
        evaluation = self._run("evaluating", evaluate_term, regularizer, outputs, batch, first_step)
        if regularizer.on_error == "last":
            self._last[regularizer.name] = evaluation.value, evaluation.metrics
        return evaluation

    def settle(
        self, regularizer: Regularizer, outputs: Outputs, evaluate: Callable[[], Evaluation]
    ) -> tuple[Evaluation | None, ObjectiveError | None]:
        """What a term counts for at a step, as its ``on_error`` says, and the error where it failed.

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
        """End the processes and workers of the terms."""
        with self._lock:
            for place in self._places.values():
                place.close()
            self._places.clear()

    def _stand_in(self, regularizer: Regularizer, outputs: Outputs) -> Evaluation | None:
        """What stands for a term that failed and whose ``on_error`` is ``last``: its last value, and no gradient.

        The last gradient is one by the logprobs of other tokens, and has no meaning for these. ``None`` for a term
        without an earlier value, and under ``skip``.
        """
        if regularizer.name not in self._last:
            return None
        value, metrics = self._last[regularizer.name]
        return Evaluation(regularizer.name, value, torch.zeros_like(outputs.logprobs_DT, requires_grad=False), metrics)

    def _run(self, doing: str, function: Callable[..., T], regularizer: Regularizer, *arguments: Any) -> T:
        try:
            if regularizer.execution in PLACES:
                return self._call(doing, regularizer, *arguments)
            if regularizer.execution == "thread" and regularizer.timeout_s is not None:
                work = partial(function, regularizer, *arguments)
                return self._threads.run(f"{regularizer.name} {doing}", work, regularizer.timeout_s)
            return function(regularizer, *arguments)
        except ExecutionError as error:
            raise failure(regularizer, doing, error) from error

    def _call(self, doing: str, regularizer: Regularizer, *arguments: Any) -> Any:
        with self._lock:
            key = (regularizer.name, doing)
            place = self._places.get(key)
            if place is None:
                place = self._places[key] = PLACES[regularizer.execution](regularizer.term)
        # The service's own datums stay here: only functions of the SDK's shape read them.
        packed = [replace(each, datums=None) if isinstance(each, Batch) else each for each in arguments]
        return place.call(doing, regularizer, *packed)
