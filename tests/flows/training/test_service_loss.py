"""Runs of sft whose whole objective is a loss of the service."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from sft_config import sft_fields

from flows.config.train import SftConfig
from flows.monitoring.drain import deliver_events, wait_until_recorded
from flows.runs.result import TrainResult
from flows.sft import sft
from objectives.errors import ObjectiveError

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")
NUM_STEPS = 4
TERMS = [
    {"name": "confidence", "weight": {"schedule": "linear", "start": 0.0, "end": 0.5}},
    {"name": "magnitude", "weight": 0.05, "every": 2},
]


def run(
    folder: Path, name: str, mlflow_uri: str, engine_url: str, objective: Mapping[str, Any], granularity: str = "task"
) -> TrainResult:
    # A large epsilon, so that rounding of gradients near 0 does not matter.
    changes = {"num_steps": NUM_STEPS, "eval_every": 0, "adam": {"eps": 1e-2}, "objective": objective}
    changes["granularity"] = granularity
    return sft(SftConfig.model_validate(sft_fields(folder, name, mlflow_uri, engine_url) | changes))


def test_one_pass_equals_two_passes(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    one = run(tmp_path, "one", mlflow_uri, engine_url, {"regularizers": TERMS})
    two = run(tmp_path, "two", mlflow_uri, engine_url, {"regularizers": TERMS, "backend": "client"}, "segment")
    client = MlflowClient(mlflow_uri)

    def curves(result: TrainResult) -> dict[str, list[tuple[int, float]]]:
        keys = client.get_run(result.mlflow_run_id).data.metrics
        points = {key: client.get_metric_history(result.mlflow_run_id, key) for key in keys}
        return {key: sorted((point.step, point.value) for point in history) for key, history in points.items()}

    ours, theirs = curves(one), curves(two)
    assert theirs.keys() - ours.keys() == {"time/forward"}  # of the pass that one pass saves
    assert ours.keys() <= theirs.keys()
    for key in ours:
        if key.startswith(("time/", "throughput/", "cost/")) or key.endswith("duration_s"):
            continue
        assert [step for step, _ in ours[key]] == [step for step, _ in theirs[key]]
        # Losses to 1e-6; metrics that divide by a small norm are less precise.
        close = 2e-6 if key.startswith("loss/") else 1e-3
        assert [value for _, value in ours[key]] == pytest.approx([value for _, value in theirs[key]], rel=close), key
    assert [step for step, _ in ours["term/magnitude/grad_share"]] == [0, 2]
    assert ours["cost/num_train_tokens"][-1][1] < 0.75 * theirs["cost/num_train_tokens"][-1][1]

    tags = client.get_run(one.mlflow_run_id).data.tags
    assert tags["tinker_flows.passes"].startswith("A step takes one pass of the service")
    records = [json.loads(line) for line in (tmp_path / "runs" / "one" / "checkpoints.jsonl").read_text().splitlines()]
    assert {record["objective"]["passes"] for record in records} == {1}
    names = task_runs(one)
    # One forward pass measures the effect of the first update, and one checks the final weights.
    assert sum(name.startswith("forward-") for name in names) == 2
    assert names.count("term-confidence") == NUM_STEPS
    assert sum(name.startswith("forward_backward-") for name in names) == NUM_STEPS


def task_runs(result: TrainResult) -> list[str]:
    deliver_events()
    wait_until_recorded(UUID(result.flow_run_id), "report")
    flow_run = FlowRunFilter(id=FlowRunFilterId.model_validate({"any_": [result.flow_run_id]}))
    with get_client(sync_client=True) as client:
        return [run.name for run in client.read_task_runs(flow_run_filter=flow_run, limit=200)]


def test_objective_that_needs_two_passes_is_rejected(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    objective = {"regularizers": [*TERMS, {"name": "logic"}], "backend": "server"}
    with pytest.raises(
        ObjectiveError, match=r"cannot run in one pass .* term 'logic' cannot be traced: its estimator 'min"
    ):
        run(tmp_path, "rejected", mlflow_uri, engine_url, objective)
