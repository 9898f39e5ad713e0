"""Process that has lost its run: it has no further effect on MLflow, its registry and traces, and on Prefect."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from uuid import UUID

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.exceptions import Abort
from prefect.runtime import flow_run
from prefect.states import Running, Scheduled
from sft_config import sft_fields

from blocks.errors import LostRunError
from blocks.storage import RunStorage
from blocks.tracking import MLflowTracking
from flows.config.train import SftConfig
from flows.monitoring.progress import step_callback
from flows.monitoring.run_tags import forget_end, forget_rejection
from flows.runs.retries import leave_state_to_successor
from flows.runs.tracking.mlflow_run import open_mlflow_run
from flows.sft import sft
from flows.sweeps.config import SweepConfig
from flows.sweeps.plan import make_plan
from flows.sweeps.record import SweepLog, check_sweep, log_best, open_sweep_log
from tasks.training.tracking.metrics import MetricsLog
from tasks.training.tracking.model_registry import Promotion, promote


def lose_run() -> None:
    raise LostRunError("The run is being written by another process.")


def start_again(flow_run_id: UUID) -> None:
    """Restart a flow run, as the automation for crashed runs and a worker do."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run_id, Scheduled(), force=True)
        client.set_flow_run_state(flow_run_id, Running(), force=True)


def state_of(flow_run_id: UUID) -> str:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run_id).state
        return state.type.value if state else ""


def test_state_of_a_restarted_flow_run_is_left_to_its_new_process(
    tmp_path: Path, mlflow_uri: str, engine_url: str, prefect_server: str, api_key: None
) -> None:
    fields = sft_fields(tmp_path, "restarted", mlflow_uri, engine_url) | {"eval_every": 0, "objective": {}}
    flow_runs: list[UUID] = []

    def replace_process(step: int, metrics: Mapping[str, float]) -> str:
        if step == 2:
            flow_runs.append(UUID(flow_run.get_id()))
            shutil.rmtree(tmp_path / "runs" / "restarted")
            start_again(flow_runs[0])
        return ""

    with step_callback(replace_process), pytest.raises(Abort, match="was removed or replaced while this process"):
        sft(SftConfig.model_validate(fields | {"num_steps": 6}))
    assert state_of(flow_runs[0]) == "RUNNING"


def test_a_flow_run_of_its_own_fails(prefect_server: str) -> None:
    flow_runs: list[UUID] = []

    @flow
    def losing() -> None:
        flow_runs.append(UUID(flow_run.get_id()))
        with leave_state_to_successor():
            lose_run()

    with pytest.raises(LostRunError):
        losing()
    assert state_of(flow_runs[0]) == "FAILED"


def test_mlflow_run_of_a_process_that_lost_the_run_before_opening_it(mlflow_uri: str) -> None:
    tracking = MLflowTracking(tracking_uri=mlflow_uri)
    with open_mlflow_run(tracking, "finished", "key", params={"a": 1}, tags={"by": "the new process"}) as log:
        pass
    with (
        pytest.raises(LostRunError),
        open_mlflow_run(tracking, "finished", "key", params={}, tags={"by": "the old one"}, check_writer=lose_run),
    ):
        pass
    run = log.client.get_run(log.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["by"] == "the new process"


def test_process_that_lost_the_run_creates_no_mlflow_run(mlflow_uri: str) -> None:
    tracking = MLflowTracking(tracking_uri=mlflow_uri)
    with (
        pytest.raises(LostRunError),
        open_mlflow_run(tracking, "never-created", "other key", params={}, tags={}, check_writer=lose_run),
    ):
        pass
    client = MlflowClient(mlflow_uri)
    assert not client.search_runs([tracking.experiment_id(client)], "attributes.run_name = 'never-created'")


def test_registry_and_tags_of_a_lost_run(mlflow_uri: str) -> None:
    client = MlflowClient(mlflow_uri)
    run_id = client.create_run(client.create_experiment("lost")).info.run_id
    client.set_tag(run_id, "tinker_flows.stopped", "The budget is spent.")
    log = MetricsLog(client, run_id, lose_run)
    promoted = Promotion("final", 4, "tinker://a/weights/final", {})
    with pytest.raises(LostRunError):
        promote.fn(log, "lost-model", promoted, lambda: "tinker://a/sampler_weights/final")
    with pytest.raises(MlflowException):
        client.get_registered_model("lost-model")
    for forget in (forget_end, forget_rejection):
        with pytest.raises(LostRunError):
            forget(log)
    assert client.get_run(run_id).data.tags["tinker_flows.stopped"] == "The budget is spent."


def test_sweep_whose_directory_was_removed_neither_ends_its_mlflow_run_nor_overwrites_its_result(
    tmp_path: Path, mlflow_uri: str
) -> None:
    fields = {"run_name": "lost-sweep", "base": sft_fields(tmp_path, "base", mlflow_uri), "metric": "test/nll"}
    plan = make_plan(SweepConfig.model_validate(fields | {"space": {"learning_rate": [1e-3]}}))
    logs: list[SweepLog] = []

    def lose_sweep() -> None:
        with RunStorage(url=str(tmp_path / "runs")).run_directory("lost-sweep") as directory:
            check_sweep(directory, plan)
            with open_sweep_log(plan, directory) as log:
                logs.append(log)
                shutil.rmtree(tmp_path / "runs" / "lost-sweep")
                log_best(log, 0, 1.0, "test/nll")

    with pytest.raises(LostRunError):
        lose_sweep()
    run = logs[0].client.get_run(logs[0].run_id)
    assert run.info.status == "RUNNING"
    assert "best/test/nll" not in run.data.metrics
