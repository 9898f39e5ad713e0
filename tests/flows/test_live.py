"""What the page of a run in the Prefect UI shows while it goes on."""

from __future__ import annotations

import json
from typing import Any

from mlflow import MlflowClient
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.live import Live
from tasks.metrics import MetricsLog

STEPS = [
    {
        "loss/total": 2.0,
        "term/base/weight": 1.0,
        "term/base/value": 2.0,
        "term/kept/weight": 0.5,
        "term/kept/value": 7.0,
    },
    {"loss/total": 1.0, "term/base/weight": 1.0, "term/base/value": 1.0},
]


def artifacts(flow_run_id: Any) -> dict[str, Any]:
    with get_client(sync_client=True) as client:
        mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        return {each.key: each for each in client.read_artifacts(artifact_filter=mine)}


def new_log(mlflow_uri: str) -> MetricsLog:
    client = MlflowClient(mlflow_uri)
    return MetricsLog(client, client.create_run("0").info.run_id)


def test_progress_and_terms_follow_the_run(prefect_server: str, mlflow_uri: str) -> None:
    log = new_log(mlflow_uri)

    @flow
    def train() -> Any:
        with Live("My run", 2, 4, log) as live:
            for metrics in STEPS:
                live.advance(metrics)
        return FlowRunContext.get().flow_run.id

    found = artifacts(train())
    assert set(found) == {"progress-my-run", "terms-my-run"}  # a SQLite file is nowhere a browser can go to
    assert found["progress-my-run"].data == 100.0
    assert found["progress-my-run"].description == "My run: step 4 of 4, loss/total 1"
    rows = {row["term"]: row["value"] for row in json.loads(found["terms-my-run"].data)}
    assert rows == {"base": "1", "kept": "7"}  # at the last step that evaluated each


def test_a_server_that_is_away_stops_nobody(prefect_server: str, mlflow_uri: str) -> None:
    log = new_log(mlflow_uri)

    @flow
    def train() -> int:
        with (
            temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
            Live("alone", 0, 2, log) as live,
        ):
            for metrics in STEPS:
                live.advance(metrics)
        return 1

    assert train() == 1


def test_without_a_flow_run_there_is_nothing_to_show(mlflow_uri: str) -> None:
    with Live("alone", 0, 2, new_log(mlflow_uri)) as live:
        live.advance(STEPS[0])
