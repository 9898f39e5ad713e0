"""Metrics of a run in MLflow: batched writes that nobody waits for, each step once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.utils.async_logging.run_operations import RunOperations

from blocks.errors import ServiceError
from tasks.options import step_task

# At every step: how far a run's log has come.
STEP_KEY = "progress/batch"

# A write of many points takes half the processor time of as many writes; slower steps are each written at once.
_WRITE_EVERY_S = 0.5
_MAX_POINTS = 1000  # MLflow's limit of a write


class MetricsLog:
    """The metrics of one MLflow run.

    A step that is already there (logged before a crash, replayed after it) is not logged a second time.
    """

    __slots__ = ("_lock", "_pending", "_steps", "_unsent", "_wrote_at", "client", "run_id")

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self.client, self.run_id = client, run_id
        # A set, because MLflow's writers may store a later step before an earlier one.
        self._steps = {metric.step for metric in client.get_metric_history(run_id, STEP_KEY)}
        self._pending: list[tuple[RunOperations, Callable[..., object]]] = []
        self._unsent: list[Metric] = []
        self._wrote_at = -_WRITE_EVERY_S
        self._lock = threading.RLock()  # a checkpoint is recorded while the next steps log

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Enqueue the metrics of a step, after a fast one perhaps with those of the next; returns at once."""
        if step in self._steps:
            return
        now = int(time.time() * 1000)
        values = {STEP_KEY: step, **metrics}
        with self._lock:
            self._unsent += [Metric(key, float(value), now, step) for key, value in values.items()]
            self._steps.add(step)
            if time.monotonic() - self._wrote_at >= _WRITE_EVERY_S:
                self._send()

    def tag(self, key: str, value: str) -> None:
        """Enqueue a tag of the run; returns at once."""
        self._enqueue(partial(self.client.set_tag, self.run_id, key, value))

    def flush(self) -> None:
        """Wait until everything logged so far is stored; what failed is written once more.

        Raises:
            ServiceError: MLflow did not store it.
        """
        try:
            with self._lock:
                self._send()
                pending, self._pending = self._pending, []
            for operations, write in pending:
                try:
                    operations.wait()
                except MlflowException:
                    write(synchronous=True)  # where it was stored all the same, an equal point is not added
        except MlflowException as error:
            raise ServiceError(
                f"MLflow did not store the metrics of run {self.run_id} ({str(error).splitlines()[0][:200]}): "
                "mend the tracking server or its disk and start the same command again."
            ) from error

    def values(self, key: str) -> dict[int, float]:
        """A metric of the run by step."""
        return {metric.step: metric.value for metric in self.client.get_metric_history(self.run_id, key)}

    def history(self) -> dict[str, list[tuple[int, float]]]:
        """Every metric of the run as (step, value) points in the order of steps."""
        keys = self.client.get_run(self.run_id).data.metrics
        return {
            key: sorted((m.step, m.value) for m in self.client.get_metric_history(self.run_id, key)) for key in keys
        }

    def _send(self) -> None:
        unsent, self._unsent, self._wrote_at = self._unsent, [], time.monotonic()
        for start in range(0, len(unsent), _MAX_POINTS):
            points = unsent[start : start + _MAX_POINTS]
            self._enqueue(partial(self.client.log_batch, self.run_id, metrics=points))

    def _enqueue(self, write: Callable[..., RunOperations | None]) -> None:
        operations = write(synchronous=False)
        if operations is not None:
            with self._lock:
                self._pending.append((operations, write))


@step_task(name="metrics", task_run_name="metrics-{step}")
def log_metrics(log: MetricsLog, step: int, metrics: Mapping[str, float]) -> None:
    """Enqueue one step's metrics."""
    log.log(step, metrics)
