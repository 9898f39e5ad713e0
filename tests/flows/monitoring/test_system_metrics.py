"""System metrics of a run: MLflow's monitor, over restarts, for a process that lost its run, and turned off."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient
from sft_config import sft_fields
from waiting import wait_for

from blocks.errors import LostRunError
from flows.config.train import SftConfig
from flows.monitoring.system_metrics import system_metrics
from flows.sft import sft
from tasks.training.tracking.metrics import MetricsLog

CPU = "system/cpu_utilization_percentage"


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    monkeypatch.delenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING")


def new_run(mlflow_uri: str) -> tuple[MlflowClient, str]:
    client = MlflowClient(mlflow_uri)
    return client, client.create_run("0").info.run_id


def samples(client: MlflowClient, run_id: str) -> list[int]:
    return sorted(point.step for point in client.get_metric_history(run_id, CPU))


def test_samples_of_a_resumed_run_follow_those_before(mlflow_uri: str) -> None:
    client, run_id = new_run(mlflow_uri)
    log = MetricsLog(client, run_id)
    log.log(0, {"loss/total": 2.0})
    log.flush()
    for _ in range(2):
        before = len(samples(client, run_id))
        with system_metrics(MetricsLog(client, run_id)):
            wait_for(lambda number=before + 2: len(samples(client, run_id)) >= number, "two samples")
    steps = samples(client, run_id)
    assert steps == list(range(len(steps)))
    assert 0 <= client.get_run(run_id).data.metrics[CPU] <= 100
    assert set(log.history()) == {"loss/total", "progress/batch"}


def test_training_run_has_them(
    tmp_path: Path, mlflow_uri: str, engine_url: str, prefect_server: str, api_key: None
) -> None:
    fields = sft_fields(tmp_path, "observed", mlflow_uri, engine_url) | {
        "num_steps": 4,
        "eval_every": 0,
        "objective": {},
    }
    result = sft(SftConfig.model_validate(fields))
    assert CPU in MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data.metrics
    assert not any(key.startswith("system/") for key in result.metrics)


def test_process_that_lost_the_run_logs_none(mlflow_uri: str) -> None:
    client, run_id = new_run(mlflow_uri)
    asked: list[int] = []

    def lose_run() -> None:
        asked.append(1)
        raise LostRunError("The run is being written by another process.")

    with system_metrics(MetricsLog(client, run_id, lose_run)):
        wait_for(lambda: asked, "a sample")
    assert samples(client, run_id) == []


def test_environment_turns_them_off(mlflow_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "false")
    client, run_id = new_run(mlflow_uri)
    log = MetricsLog(client, run_id, lambda: pytest.fail("a sample was logged"))
    with system_metrics(log):
        assert samples(client, run_id) == []
