"""Metrics of a run in MLflow: asynchronous, batched writes; each step is logged once."""

from __future__ import annotations

import hashlib
import posixpath
import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from blocks.errors import ServiceError
from blocks.mlflow_internals import RunOperations
from tasks.common.task import step_task
from tasks.training.metrics_file import MetricsFile

# Metric that every step logs, which shows the steps that a run has logged.
STEP_KEY = "progress/batch"

# One batched write takes half the processor time of separate ones; steps slower than this are written at once.
_WRITE_EVERY_S = 0.5
_MAX_POINTS = 1000  # MLflow's limit per write


# A character that MLflow rejects in names, and a hyphen that would read as the start of an escape sequence.
_FORBIDDEN = r"[^/\w.\- :]"
_ESCAPED = re.compile(rf"{_FORBIDDEN}|-(?=x[0-9a-f]*(?:-|{_FORBIDDEN}))")
# The same for names that are no normal path.
_FORBIDDEN_IN_PATH = r"(?:[^\w.\- :]|^\.)"
_ESCAPED_IN_PATH = re.compile(rf"{_FORBIDDEN_IN_PATH}|-(?=x[0-9a-f]*(?:-|{_FORBIDDEN_IN_PATH}))")
_MAX_NAME = 210  # MLflow's limit is 250; the rest is for prefixes such as `baseline/`


def safe_name(name: str) -> str:
    """Return the name under which MLflow stores a metric or tag of any name; distinct names stay distinct.

    A name that MLflow accepts is unchanged. Other characters become `-xHEX-`, with their code point in hexadecimal. In
    a name that is no normal path, such as `/a` or `a//b`, slashes are such characters. A long name is cut, and ends
    with a hash of the whole name.

    >>> safe_name("test/accuracy"), safe_name("pass@1"), safe_name("acc (%)")
    ('test/accuracy', 'pass-x40-1', 'acc -x28--x25--x29-')
    """
    is_path = posixpath.normpath(name) == name and name != "." and not name.startswith(("..", "/"))
    pattern = _ESCAPED if is_path else _ESCAPED_IN_PATH
    escaped = pattern.sub(lambda match: f"-x{ord(match[0]):x}-", name) or "-x-"
    if len(escaped) <= _MAX_NAME:
        return escaped
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{escaped[: _MAX_NAME - len(digest) - 1]}-{digest}"


class MetricsLog:
    """Metrics of one MLflow run; a step that a crashed run has already logged is not logged again.

    Attributes:
        file: metrics.jsonl in the directory of the run, if the run has one.
    """

    __slots__ = ("_lock", "_pending", "_steps", "_unsent", "_wrote_at", "client", "file", "run_id")

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self.client, self.run_id = client, run_id
        self.file: MetricsFile | None = None
        # MLflow's writers may store a later step before an earlier one, so a maximum does not suffice.
        self._steps = {metric.step for metric in client.get_metric_history(run_id, STEP_KEY)}
        self._pending: list[tuple[RunOperations, Callable[..., object]]] = []
        self._unsent: list[Metric] = []
        self._wrote_at = -_WRITE_EVERY_S
        self._lock = threading.RLock()  # a checkpoint is recorded while the next steps log

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Enqueue the metrics of a step without waiting; fast steps share a write."""
        values = {STEP_KEY: step, **metrics}
        if self.file:
            self.file.log(step, values)
        if step in self._steps:
            return
        now = int(time.time() * 1000)
        with self._lock:
            self._unsent += [Metric(key, float(value), now, step) for key, value in values.items()]
            self._steps.add(step)
            if time.monotonic() - self._wrote_at >= _WRITE_EVERY_S:
                self._send()

    def tag(self, key: str, value: str) -> None:
        """Enqueue a tag of the run without waiting."""
        self._enqueue(partial(self.client.set_tag, self.run_id, key, value))

    def flush(self) -> None:
        """Wait until all metrics and tags logged so far are stored; failed writes are retried once.

        Raises:
            ServiceError: MLflow did not store a write.
            StorageError: metrics.jsonl cannot be written.
        """
        try:
            with self._lock:
                self._send()
                pending, self._pending = self._pending, []
            for operations, write in pending:
                try:
                    operations.wait()
                except MlflowException:
                    write(synchronous=True)  # MLflow ignores points that it has already stored
        except MlflowException as error:
            raise ServiceError(
                f"MLflow did not store the metrics of run {self.run_id} ({str(error).splitlines()[0][:200]}): "
                "fix the tracking server or its disk and start the same command again."
            ) from error
        finally:
            if self.file:
                self.file.flush()

    def values(self, key: str) -> dict[int, float]:
        """Values of a metric by step."""
        return {metric.step: metric.value for metric in self.client.get_metric_history(self.run_id, key)}

    def history(self) -> dict[str, list[tuple[int, float]]]:
        """Points (step, value) of every metric, in the order of steps."""
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
