"""A table of results: an artifact in Prefect, and a table in MLflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect.artifacts import create_table_artifact
from prefect.runtime import flow_run

from tasks.metrics import MetricsLog
from tasks.options import retried_task
from tasks.page import artifact_key

Rows = Sequence[Sequence[Any]]


@retried_task(name="report")
def write_table(log: MetricsLog, kind: str, run_name: str, columns: Sequence[str], rows: Rows) -> None:
    """Keep a table as `<kind>.json` in MLflow, and as the artifact `<kind>-<run name>` in Prefect."""
    log.client.log_table(log.run_id, _by_column(columns, rows), f"{kind}.json")
    if flow_run.get_id():
        table = [dict(zip(columns, row, strict=True)) for row in rows]
        create_table_artifact(table, artifact_key(kind, run_name), description=f"{kind} of {run_name}")


def write_samples(log: MetricsLog, columns: Sequence[str], rows: Rows) -> None:
    """Keep what was sampled as `samples.json` in MLflow."""
    log.client.log_table(log.run_id, _by_column(columns, rows), "samples.json")


def _by_column(columns: Sequence[str], rows: Rows) -> dict[str, list[Any]]:
    return {column: [row[index] for row in rows] for index, column in enumerate(columns)}
