"""Metrics log of a run with a store that fails temporarily."""

from __future__ import annotations

import io
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow_store import new_store

from blocks.errors import ServiceError, StorageError
from flows.runs.cli import silence_console_logs
from flows.training.budget import cost_before_restart
from tasks.training.tracking.metrics import STEP_KEY, MetricsLog


def rename(mlflow_uri: str, before: str, after: str) -> None:
    with closing(sqlite3.connect(mlflow_uri.removeprefix("sqlite:///"))) as connection:
        connection.execute(f"ALTER TABLE {before} RENAME TO {after}")


class Client(MlflowClient):
    """Client that counts its batches, and fails from a batch on or waits before the first."""

    num_batches = 0
    fails_from = 1_000_000
    gate: threading.Event | None = None

    def log_batch(self, *arguments: Any, **options: Any) -> Any:
        if self.gate:
            self.gate.wait(60)
        self.num_batches += 1
        if self.num_batches >= self.fails_from:
            raise MlflowException("the process was killed")
        return super().log_batch(*arguments, **options)


def test_fast_steps_are_written_together(mlflow_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(mlflow_uri)
    client.gate = threading.Event()
    log = MetricsLog(client, client.create_run(client.create_experiment("metrics-log-fast")).info.run_id)
    many = {f"term/{number}/value": float(number) for number in range(300)}
    for step in range(7):
        log.log(step, many)
    client.gate.set()
    log.flush()
    assert client.num_batches in (3, 4)  # at most three steps fit into a batch; the first may have been on its way
    history = log.history()
    assert len(history) == 301
    assert all([step for step, _ in points] == list(range(7)) for points in history.values())


def test_a_wait_for_mlflow_and_the_cause_of_its_error_are_shown(
    mlflow_uri: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tasks.training.tracking.metrics._SILENT_S", 0.1)
    client = Client(mlflow_uri)
    log = MetricsLog(client, client.create_run(client.create_experiment("metrics-log-waits")).info.run_id)
    client.gate = threading.Event()
    log.log(0, {"loss/total": 3.0})
    threading.Timer(1.0, client.gate.set).start()
    log.flush()
    assert capfd.readouterr().err.count("Waiting for MLflow to store metrics.") == 1
    remark = "(raised as a result of Query-invoked autoflush; consider using a session.no_autoflush block)"
    error = MlflowException(f"{remark}\n(sqlite3.OperationalError) database or disk is full\n[SQL: INSERT]")
    monkeypatch.setattr(client, "log_batch", raising(error))
    log.log(1, {"loss/total": 3.0})
    with pytest.raises(
        ServiceError, match=r"\(\(sqlite3.OperationalError\) database or disk is full\): fix the tracking"
    ):
        log.flush()


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_unstored_metrics_are_written_again(mlflow_uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A write that fails twice takes nothing behind it along."""
    client = MlflowClient(mlflow_uri)
    run = client.create_run(client.create_experiment("metrics-log"))
    log = MetricsLog(client, run.info.run_id)
    log.log(0, {"loss/total": 3.0})
    log.flush()
    rename(mlflow_uri, "metrics", "away")
    try:
        for step in (1, 2):
            log.log(step, {"loss/total": 3.0 - step})
            log.tag("note", f"step {step}")
            with pytest.raises(ServiceError, match="did not store the metrics"):
                log.flush()
    finally:
        rename(mlflow_uri, "away", "metrics")
    log.log(3, {"loss/total": 0.0})
    log.flush()
    expected = [(0, 3.0), (1, 2.0), (2, 1.0), (3, 0.0)]
    assert log.history() == {"loss/total": expected, STEP_KEY: [(step, float(step)) for step in range(4)]}
    assert client.get_run(run.info.run_id).data.tags["note"] == "step 2"
    assert capfd.readouterr().err.count("trying again") <= 1


def test_sql_of_a_failed_request_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = MlflowClient(new_store(tmp_path))
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        connection.execute("ALTER TABLE runs RENAME TO other")
    silence_console_logs()
    with pytest.raises(MlflowException, match="no such table: runs"):
        client.get_run("0" * 32)
    assert "SELECT" not in capsys.readouterr().err


def test_handlers_of_other_libraries_are_not_silenced() -> None:
    internal = logging.getLogger("prefect._internal")
    handler = logging.StreamHandler(io.StringIO())
    internal.addHandler(handler)
    try:
        silence_console_logs()
        internal.error("A thread failed.")
    finally:
        internal.removeHandler(handler)
    assert handler.stream.getvalue() == "A thread failed.\n"


def test_step_counts_as_logged_after_all_of_its_points(mlflow_uri: str) -> None:
    """A step of more points than a write takes is written in parts; a kill between them loses and doubles nothing."""
    client = Client(mlflow_uri)
    run_id = client.create_run(client.create_experiment("metrics-log-large")).info.run_id
    points = {f"term/{number}/value": float(number) for number in range(2500)}
    killed = MetricsLog(client, run_id)
    killed.log(0, points)
    killed.flush()
    client.fails_from = client.num_batches + 2  # the first part of the next step is stored
    killed.log(1, points)
    with pytest.raises(ServiceError, match="the process was killed"):
        killed.flush()
    assert len(client.get_metric_history(run_id, "term/0/value")) == 2

    resumed = MetricsLog(MlflowClient(mlflow_uri), run_id)
    assert set(resumed.values(STEP_KEY)) == {0}
    for step in range(3):
        resumed.log(step, {key: value + step for key, value in points.items()})
    resumed.flush()
    for key in ("term/0/value", "term/1500/value", "term/2499/value", STEP_KEY):
        steps = [metric.step for metric in client.get_metric_history(run_id, key)]
        assert sorted(steps) == [0, 1, 2], key


def test_a_repeated_step_adds_its_costs_and_what_is_not_stored(mlflow_uri: str) -> None:
    """A resumed run may evaluate more often, and pays for a step again; the other values are the same."""
    client = MlflowClient(mlflow_uri)
    run_id = client.create_run(client.create_experiment("metrics-log-repeated")).info.run_id
    killed = MetricsLog(client, run_id)
    for step in range(3):
        killed.log(step, {"loss/total": 3.0 - step, "time/step": 0.5, "cost/usd": 10.0 * (step + 1)})
    killed.flush()
    for cost in (40.0, 50.0):  # a second kill comes before the costs exceed those of the last step
        resumed = MetricsLog(client, run_id)
        resumed.log(1, {"loss/total": 2.0, "time/step": 0.75, "cost/usd": cost, "test/nll": 4.0})
        resumed.flush()
    assert resumed.values("cost/usd") == {0: 10.0, 1: 50.0, 2: 30.0}
    assert cost_before_restart(resumed, {"usd": 20.0}) == {"usd": 50.0}
    for key, number in (("loss/total", 3), ("time/step", 3), ("test/nll", 1), (STEP_KEY, 3)):
        assert len(client.get_metric_history(run_id, key)) == number, key


@pytest.mark.parametrize("clock_change_s", [0, -600])
@pytest.mark.parametrize("starts_over", [True, False])
def test_a_run_that_starts_over_replaces_other_values(
    starts_over: bool, clock_change_s: int, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its data may have been corrected; a run with a checkpoint has checked that its data is the same.

    Another machine may continue it, whose clock is behind.
    """
    client = MlflowClient(mlflow_uri)
    experiment = client.create_experiment(f"metrics-log-over-{starts_over}{clock_change_s}")
    run_id = client.create_run(experiment).info.run_id
    killed = MetricsLog(client, run_id)
    for step in range(2):
        killed.log(step, {"loss/total": 3.0, "optim/lr": 0.1, "time/step": 1.0, "cost/usd": 1.0})
    killed.log_unfinished(2, {"cost/usd": 2.0})
    killed.flush()
    client.set_terminated(run_id)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + clock_change_s)
    again = MetricsLog(client, run_id)
    again.starts_over = starts_over
    again.log(0, {"loss/total": 3.0, "optim/lr": 0.1, "time/step": 2.0})
    again.log(1, {"loss/total": 2.5, "optim/lr": 0.1, "time/step": 2.0})
    again.log(2, {"cost/usd": 3.0})
    again.flush()
    assert again.values("cost/usd") == {0: 1.0, 1: 1.0, 2: 3.0}
    assert again.values("loss/total") == {0: 3.0, 1: 2.5 if starts_over else 3.0}
    assert again.values("time/step") == {0: 1.0, 1: 1.0}
    assert len(client.get_metric_history(run_id, "optim/lr")) == 2
    numbers = [point.step for point in client.get_metric_history(run_id, STEP_KEY)]
    assert sorted(numbers) == ([0, 1, 1, 2] if starts_over else [0, 1, 2]), "only a step with other values"
    third = MetricsLog(client, run_id)
    third.starts_over = starts_over
    third.log(1, {"loss/total": 2.0, "optim/lr": 0.1, "time/step": 2.0, "test/nll": 4.0})
    third.flush()
    if starts_over:  # the next start knows the time of a new metric, too
        clock_change_s -= 600
        fourth = MetricsLog(client, run_id)
        fourth.starts_over = True
        fourth.log(1, {"loss/total": 2.0, "optim/lr": 0.1, "time/step": 2.0, "test/nll": 3.5})
        fourth.flush()
        assert fourth.values("test/nll") == {1: 3.5}
    assert third.values("loss/total") == {0: 3.0, 1: 2.0 if starts_over else 3.0}


def test_process_that_lost_the_run_writes_nothing(mlflow_uri: str) -> None:
    client = MlflowClient(mlflow_uri)
    run_id = client.create_run(client.create_experiment("metrics-log-lost")).info.run_id
    is_lost = False

    def check_writer() -> None:
        if is_lost:
            raise StorageError("The run is being written by another process.")

    log = MetricsLog(client, run_id, check_writer)
    log.log(0, {"loss/total": 3.0})
    log.flush()
    is_lost = True
    log.log(1, {"loss/total": 2.0})
    log.tag("note", "late")
    with pytest.raises(StorageError, match="by another process"):
        log.flush()
    assert log.values("loss/total") == {0: 3.0}
    assert "note" not in client.get_run(run_id).data.tags


def test_a_step_has_one_value_on_reading(mlflow_uri: str) -> None:
    """The newest, if the write of a process that lost the run arrived late."""
    client = MlflowClient(mlflow_uri)
    run_id = client.create_run(client.create_experiment("metrics-log-late")).info.run_id
    for step, value, timestamp in ((0, 3.0, 1000), (1, 1.0, 4000), (1, 2.0, 2000)):
        client.log_metric(run_id, "loss/total", value, timestamp, step)
    assert MetricsLog(client, run_id).history() == {"loss/total": [(0, 3.0), (1, 1.0)]}
