"""Metrics of the machine that runs a run: processor, memory, disk, network and GPU use, by MLflow's monitor."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING

from blocks.mlflow_internals import SystemMetricsMonitor
from tasks.training.tracking.metrics import MetricsLog

# MLflow does not limit the time of its last write, and its server may not respond.
_LAST_WRITE_S = 5.0


@contextmanager
def system_metrics(log: MetricsLog) -> Iterator[None]:
    """Log the metrics `system/...` every ten seconds; MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING=false turns them off."""
    if MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.is_set() and not MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get():
        yield
        return
    monitor = _Monitor(log)
    monitor.start()
    try:
        yield
    finally:
        end = threading.Thread(target=monitor.finish, name="system-metrics", daemon=True)
        end.start()
        end.join(_LAST_WRITE_S)


class _Monitor(SystemMetricsMonitor):
    """MLflow's monitor of a run; after a resume, it continues the step numbers of the earlier start."""

    def __init__(self, log: MetricsLog) -> None:
        super().__init__(log.run_id, resume_logging=True, tracking_uri=log.client.tracking_uri)
        self._log = log

    def publish_metrics(self, metrics: Mapping[str, float]) -> None:
        """Write the metrics, unless another process has taken over the run; the monitor ends after an error."""
        self._log.check_writer()
        super().publish_metrics(metrics)
        self.mlflow_logger.flush()
