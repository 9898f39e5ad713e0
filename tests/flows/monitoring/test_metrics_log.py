"""Metrics log of a run with a store that fails temporarily."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing

import pytest
from mlflow import MlflowClient

from blocks.errors import ServiceError
from tasks.training import metrics
from tasks.training.metrics import STEP_KEY, MetricsLog


def rename(mlflow_uri: str, before: str, after: str) -> None:
    with closing(sqlite3.connect(mlflow_uri.removeprefix("sqlite:///"))) as connection:
        connection.execute(f"ALTER TABLE {before} RENAME TO {after}")


def test_fast_steps_are_written_together(mlflow_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = MlflowClient(mlflow_uri)
    log = MetricsLog(client, client.create_run(client.create_experiment("metrics-log-fast")).info.run_id)
    monkeypatch.setattr(metrics, "_WRITE_EVERY_S", 60.0)
    many = {f"term/{number}/value": float(number) for number in range(300)}
    for step in range(5):
        log.log(step, many)
    assert len(log._pending) == 1  # the first step is written at once
    log.flush()
    history = log.history()
    assert len(history) == 301
    assert all([step for step, _ in points] == [0, 1, 2, 3, 4] for points in history.values())


def test_unstored_metrics_are_written_again(mlflow_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_WRITE_EVERY_S", 0.0)
    client = MlflowClient(mlflow_uri)
    run = client.create_run(client.create_experiment("metrics-log"))
    log = MetricsLog(client, run.info.run_id)
    log.log(0, {"loss/total": 3.0})
    log.flush()
    rename(mlflow_uri, "metrics", "away")
    try:
        log.log(1, {"loss/total": 2.0})
        with pytest.raises(ServiceError, match="did not store the metrics"):
            log.flush()
        log.log(2, {"loss/total": 1.0})
        deadline = time.monotonic() + 60
        while not log._pending[0][0]._operation_futures[0].done() and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        rename(mlflow_uri, "away", "metrics")
    log.flush()
    assert log.history() == {"loss/total": [(0, 3.0), (2, 1.0)], STEP_KEY: [(0, 0.0), (2, 2.0)]}
