"""Task runs of a run with the granularity `segment`."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from sft_config import sft_fields

from blocks import RunStorage
from flows.config.train import SftConfig
from flows.monitoring.drain import deliver_events, wait_until_recorded
from flows.monitoring.progress import step_callback
from flows.sft import sft
from tasks.training.checkpoints import read_records

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")


def test_a_stop_completes_the_segment(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    """The stop is raised after the task of the segment, which would otherwise fail or crash."""
    fields = sft_fields(tmp_path, "stopped", mlflow_uri, engine_url)
    fields |= {"granularity": "segment", "eval_every": 0, "checkpoint_every": 4}
    config = SftConfig.model_validate(fields)
    with step_callback(lambda step, _: "enough" if step == 5 else ""):
        state = sft(config, return_state=True)
    assert state.is_cancelled()
    flow_run_id = state.state_details.flow_run_id
    assert flow_run_id
    deliver_events()
    wait_until_recorded(flow_run_id, None)
    with get_client(sync_client=True) as client:
        filters = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
        states = {run.name: run.state_name for run in client.read_task_runs(flow_run_filter=filters)}
    assert {states["segment-0-4"], states["segment-4-8"]} == {"Completed"}
    newest, *_ = read_records(RunStorage(url=str(tmp_path / "runs")).run_directory("stopped")).checkpoints
    assert newest.batch == 6
    assert sft(config).num_steps == 8
