"""The report of a run, made from what MLflow has where the run itself made none."""

from __future__ import annotations

from blocks.errors import ConfigError
from deployments.recorded_run import mlflow_run_of, recorded_run
from tasks.checkpoint import read_records
from tasks.metrics import MetricsLog
from tasks.report import write_report

REPORT = "report.html"


def report_of(run_name: str, storage: str, *, again: bool) -> str:
    """Where the report of a run is.

    Args:
        again: make it anew.

    Raises:
        ConfigError: there is no such run, or it has logged nothing.
        StorageError: it has none, and is being written by another process.
    """
    run = recorded_run(run_name, storage)
    where = f"{run.directory.location}/{REPORT}"
    if not again and run.directory.read_bytes(REPORT) is not None:
        return where
    client, found = mlflow_run_of(run, read_records(run.directory))
    log = MetricsLog(client, found.info.run_id) if found else None
    history = log.history() if log else {}
    if log is None or not any(key.startswith("term/") for key in history):
        raise ConfigError(
            f"The run {run_name!r} has logged no step yet, so that there is nothing to report: go on with it by "
            f"`tinker-flows resume {run_name}`."
        )
    with run.directory as directory:
        return write_report.fn(directory, log, run_name, history)
