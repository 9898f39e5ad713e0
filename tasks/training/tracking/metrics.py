"""Metrics of a run in MLflow: batched writes in the background; a step that runs again adds what is new."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from tqdm import tqdm

from blocks.errors import ServiceError, StorageError
from blocks.terminal import escape_terminal
from tasks.common.task import step_task
from tasks.training.tracking.metrics_file import MetricsFile

# Metric that every step logs last, which shows the steps that are logged completely.
STEP_KEY = "progress/batch"

# Prefix of the costs of a run, which grow with each repetition of a step.
COST_PREFIX = "cost/"

# Metrics that differ whenever a step runs again.
_OF_TIME = ("time/", "throughput/")
_DURATION = "duration_s"

# Prefix of the metrics of MLflow's system monitor.
SYSTEM_PREFIX = "system/"

# One batched write takes half the processor time of separate ones; steps slower than this are written at once.
_WRITE_EVERY_S = 0.5
_MAX_POINTS = 1000  # MLflow's limit per write
_SILENT_S = 10.0  # time after which the user learns that a run waits for MLflow


def metric_values(client: MlflowClient, run_id: str, key: str) -> dict[int, float]:
    """Read the values of a metric by step, in the order of steps.

    A step has one value, the newest. MLflow may store a step twice: a process that was suspended in the middle of a
    write completes the write when it continues, although another process has taken over its run.
    """
    return {step: point.value for step, point in sorted(newest_points(client, run_id, key).items())}


def newest_points(client: MlflowClient, run_id: str, key: str) -> dict[int, Metric]:
    """Read the newest point of a metric at each step."""
    points = sorted(client.get_metric_history(run_id, key), key=lambda point: point.timestamp)
    return {point.step: point for point in points}


class _Step(NamedTuple):
    """Step to write.

    Attributes:
        is_repeated: True if an earlier process has logged the step.
    """

    points: list[Metric]
    is_repeated: bool


class MetricsLog:
    """Metrics of one MLflow run.

    A background thread writes in the order of the calls. Writes that the store has not confirmed are repeated. Of a
    step that an earlier process has logged, only its costs and the metrics that are not stored yet are logged again.

    Attributes:
        starts_over: True for a run without a checkpoint, whose data or code may have changed since an earlier start.
            Other values of a repeated step are then logged, too, and readers take the newest.
        check_writer: raises StorageError if another process has taken over the run; call it before an effect outside of
            the run's directory.
        file: metrics.jsonl in the directory of the run, if the run has one.
    """

    __slots__ = (
        "_has_metrics",
        "_is_failing",
        "_lock",
        "_models",
        "_not_before",
        "_points",
        "_repeatable",
        "_steps",
        "_stored",
        "_tags",
        "_unwritten",
        "_writer",
        "_writing",
        "_wrote_at",
        "check_writer",
        "client",
        "file",
        "run_id",
        "starts_over",
    )

    def __init__(self, client: MlflowClient, run_id: str, check_writer: Callable[[], None] = lambda: None) -> None:
        """Read which steps are logged."""
        self.client, self.run_id, self.check_writer = client, run_id, check_writer
        self.file: MetricsFile | None = None
        run = client.get_run(run_id)
        self._has_metrics = bool(run.data.metrics)
        logged = client.get_metric_history(run_id, STEP_KEY)
        self._steps = {metric.step for metric in logged}
        # The newest point of a step counts, so points are never older than those of an earlier process, whose clock may
        # have been ahead.
        self._not_before = 1 + max([run.info.end_time or 0, *(metric.timestamp for metric in logged)])
        self._repeatable = set(self._steps)  # steps of earlier processes that this one has not repeated
        self.starts_over = False
        self._stored: dict[str, dict[int, Metric]] = {}  # points of each metric when it was first looked up
        self._unwritten: deque[_Step] = deque()
        self._models: dict[int, str] = {}  # logged models by step, whose points are not logged yet
        self._points: dict[int, list[Metric]] = {}  # points of steps whose logged model is not created yet
        self._tags: dict[str, str] = {}
        self._writer: threading.Thread | None = None
        self._is_failing = False
        self._wrote_at = -_WRITE_EVERY_S
        self._lock, self._writing = threading.Lock(), threading.Lock()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Enqueue the metrics of a step without waiting; fast steps share a write."""
        if self.file:
            self.file.log(step, {STEP_KEY: step, **metrics})
        is_repeated = step in self._repeatable
        if step in self._steps and not is_repeated:
            return
        now = self._now()
        with self._lock:
            model_id = self._models.pop(step, None)
            points = [
                Metric(key, float(value), now, step, model_id) for key, value in metrics.items() if key != STEP_KEY
            ]
            self._unwritten.append(_Step([*points, Metric(STEP_KEY, float(step), now, step)], is_repeated))
            self._steps.add(step)
            self._repeatable.discard(step)
            if step in self._points and not is_repeated:
                self._points[step] = points
        self._start_to_write()

    def log_unfinished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store metrics of a step that a resumed run will log; if MLflow does not respond, do nothing."""
        self.check_writer()
        now = self._now()
        with suppress(MlflowException):
            points = [Metric(key, float(value), now, step) for key, value in metrics.items()]
            self.client.log_batch(self.run_id, metrics=points)

    def expect_model(self, step: int) -> None:
        """Keep the points of a step, which is not logged yet, for a call of `link`."""
        with self._lock:
            self._points[step] = []

    def link(self, step: int, model_id: str) -> None:
        """Link the points of a step to a logged model, now or when they are logged.

        This logs the points again, except those that the model has. Because they have their original timestamps, the
        run gets no further points.

        Raises:
            MlflowException, ServiceError: MLflow did not store them.
        """
        with self._lock:
            points = self._points.pop(step, [])
            may_repeat = step in self._repeatable
            if may_repeat or not self.has_logged(step):
                self._models[step] = model_id
            if not self.has_logged(step) or (may_repeat and self.starts_over):
                return
        self.check_writer()
        self.flush()  # the points themselves come first
        # MLflow rejects more than 100 points at once if the model has one of them, which an earlier process linked.
        before = self.client.get_logged_model(model_id).metrics if may_repeat else ()
        stored = {(point.key, point.timestamp) for point in before or ()}
        points = [point for point in points or self._at(step) if (point.key, point.timestamp) not in stored]
        linked = [Metric(point.key, point.value, point.timestamp, step, model_id) for point in points]
        for start in range(0, len(linked), _MAX_POINTS):
            self.client.log_batch(self.run_id, metrics=linked[start : start + _MAX_POINTS])

    def has_logged(self, step: int) -> bool:
        """Return whether a step is logged, by this process or an earlier one."""
        return step in self._steps

    def may_repeat(self, step: int) -> bool:
        """Return whether only an earlier process has logged a step, which this one may run again."""
        return step in self._repeatable

    def _at(self, step: int) -> list[Metric]:
        """Read the newest points of a step that is logged."""
        keys = [key for key in self.step_keys() if key != STEP_KEY]
        return [points[step] for key in keys if step in (points := newest_points(self.client, self.run_id, key))]

    def tag(self, key: str, value: str) -> None:
        """Enqueue a tag of the run without waiting."""
        with self._lock:
            self._tags[key] = value
        self._start_to_write()

    def flush(self) -> None:
        """Wait until all metrics and tags logged so far are stored; failed writes are retried once.

        Raises:
            ServiceError: MLflow did not store a write, which the next call tries again.
            StorageError: metrics.jsonl cannot be written, or another process has taken over the run.
        """
        notice = threading.Timer(_SILENT_S, _print, ["Waiting for MLflow to store metrics."])
        notice.daemon = True
        notice.start()
        try:
            try:
                self._write()
            except MlflowException:
                self._write()
        except MlflowException as error:
            raise ServiceError(
                f"MLflow did not store the metrics of run {self.run_id} ({_first_line(error)}): "
                "fix the tracking server or its disk and start the same command again."
            ) from error
        finally:
            notice.cancel()
            if self.file:
                self.file.flush()

    def values(self, key: str) -> dict[int, float]:
        """Values of a metric by step."""
        return metric_values(self.client, self.run_id, key)

    def history(self) -> dict[str, list[tuple[int, float]]]:
        """Points (step, value) of every metric but the system's, in the order of steps."""
        return {key: list(self.values(key).items()) for key in self.step_keys()}

    def step_keys(self) -> list[str]:
        """Names of the metrics of training steps, without system metrics, whose steps count samples."""
        keys = self.client.get_run(self.run_id).data.metrics
        return [key for key in keys if not key.startswith(SYSTEM_PREFIX)]

    def _now(self) -> int:
        return max(int(time.time() * 1000), self._not_before)

    def _start_to_write(self) -> None:
        is_busy = self._writer is not None and self._writer.is_alive()
        if not is_busy and time.monotonic() - self._wrote_at >= _WRITE_EVERY_S:
            self._writer = threading.Thread(target=self._try_to_write, name="metrics-log", daemon=True)
            self._writer.start()

    def _try_to_write(self) -> None:
        try:
            self._write()
        except MlflowException as error:  # `flush` tries again and raises the error
            if not self._is_failing:
                _print(f"MLflow did not store metrics ({_first_line(error)}); trying again.")
            self._is_failing = True
        except StorageError:
            return  # `flush` raises it

    def _write(self) -> None:
        """Write everything enqueued; what fails stays enqueued."""
        with self._writing:  # one write at a time, so that a step counts as logged after all of its points
            while self._unwritten or self._tags:
                self.check_writer()
                self._wrote_at = time.monotonic()
                self._write_tags()
                self._write_steps()
                self._is_failing = False

    def _write_tags(self) -> None:
        for key, value in list(self._tags.items()):
            self.client.set_tag(self.run_id, key, value)
            with self._lock:
                if self._tags.get(key) == value:
                    del self._tags[key]

    def _write_steps(self) -> None:
        """Write as many of the next steps as fit into one write, or one large step in several writes."""
        with self._lock:
            steps = list(self._unwritten)
        points: list[Metric] = []
        num_steps = 0
        while num_steps < len(steps) and (not points or len(points) + len(steps[num_steps].points) <= _MAX_POINTS):
            step = steps[num_steps]
            may_be_stored = step.is_repeated or len(step.points) > _MAX_POINTS
            points += self._without_stored(step.points) if may_be_stored else step.points
            num_steps += 1
        for start in range(0, len(points), _MAX_POINTS):
            self.check_writer()
            self.client.log_batch(self.run_id, metrics=points[start : start + _MAX_POINTS])
        with self._lock:
            for _ in range(num_steps):
                self._unwritten.popleft()

    def _without_stored(self, points: list[Metric]) -> list[Metric]:
        """Leave out what an earlier process has stored: a step that runs again, or the first parts of a large step."""
        if not self._has_metrics:
            return points
        keys = {point.key for point in points if not point.key.startswith(COST_PREFIX)}
        for key in keys - self._stored.keys():
            self._stored[key] = newest_points(self.client, self.run_id, key)
        new: list[Metric] = []
        replaces = False
        for point in points:
            stored = self._stored.get(point.key, {}).get(point.step)
            differs = stored is not None and self.starts_over and _is_other(point, stored)
            is_new = stored is None and self.starts_over and not point.key.startswith(COST_PREFIX)
            replaces = replaces or differs or is_new
            # A step with other values is logged as complete again, so that the next start knows the newest timestamp.
            if stored is None or differs or (point.key == STEP_KEY and replaces):
                new.append(point)
            elif self.starts_over and point.model_id:  # link the stored point; the run gets no further one
                new.append(Metric(point.key, stored.value, stored.timestamp, point.step, point.model_id))
        return new


def _is_other(point: Metric, stored: Metric) -> bool:
    """Return whether a point has another value than the stored one, for another reason than time."""
    is_of_time = point.key.startswith(_OF_TIME) or point.key.endswith(_DURATION)
    both_nan = math.isnan(point.value) and math.isnan(stored.value)
    return point.value != stored.value and not (is_of_time or both_nan)


def _first_line(error: Exception) -> str:
    # SQLAlchemy puts a remark about the moment of the error before its cause.
    lines = [line for line in str(error).splitlines() if not line.startswith("(raised as a result of Query-invoked")]
    return (lines or [""])[0][:200]


def _print(text: str) -> None:
    tqdm.write(escape_terminal(text), file=sys.stderr)


@step_task(name="metrics", task_run_name="metrics-{step}")
def log_metrics(log: MetricsLog, step: int, metrics: Mapping[str, float]) -> None:
    """Enqueue one step's metrics."""
    log.log(step, metrics)
