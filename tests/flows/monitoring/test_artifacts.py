"""Artifacts on the page of a run in the Prefect UI: progress, terms and a link to the MLflow run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from chaos.proxy import Armed, Proxies, Proxy
from chaos.schedule import Fault
from mlflow import MlflowClient
from mlflow_process import running_mlflow
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.client.schemas.objects import Artifact
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks.errors import LostRunError
from blocks.servers.processes import free_port
from flows.monitoring.artifacts import RunPage
from flows.monitoring.drain import deliver_events
from tasks.reports.tables import COLUMNS
from tasks.training.tracking.metrics import MetricsLog

STEPS = [
    {
        "loss/total": 2.0,
        "train_mean_nll": 0.25,
        "term/base/weight": 1.0,
        "term/base/value": 2.0,
        "term/base/contribution": 2.0,
        "term/base/grad_share": 0.75,
        "term/base/cosine_to_base": 1.0,
        "term/kl/weight": 0.5,
        "term/kl/value": 7.0,
        "term/kl/contribution": 3.5,
        "term/kl/grad_share": 0.25,
        "term/kl/cosine_to_base": -0.5,
    },
    # The second step evaluates only the base loss.
    {"loss/total": 1.0, "term/base/weight": 1.0, "term/base/value": 1.0, "term/base/contribution": 1.0},
]
KL_ROW = ["kl", "7", "0.5", "3.5", "25.0%", "-0.500"]


def artifacts(filter_: ArtifactFilter) -> dict[str, Artifact]:
    """Read the artifacts that match a filter, by key."""
    with get_client(sync_client=True) as client:
        return {artifact.key or "": artifact for artifact in client.read_artifacts(artifact_filter=filter_)}


def artifacts_of(flow_run_id: Any) -> dict[str, Artifact]:
    return artifacts(ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id])))


def flow_run_id() -> Any:
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    return context.flow_run.id


def wait_for_artifact(run_id: Any, key: str, text: str) -> Artifact:
    """Wait until the description of an artifact contains a text."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        artifact = artifacts_of(run_id).get(key)
        if artifact and text in (artifact.description or ""):
            return artifact
        time.sleep(0.1)
    raise AssertionError(f"{key} does not show {text!r}: {artifacts_of(run_id)}")


def term_rows(artifact: Artifact) -> list[list[str]]:
    rows = json.loads(str(artifact.data))
    assert [list(row) for row in rows] == [list(COLUMNS)] * len(rows)
    return [list(row.values()) for row in rows]


def new_log(mlflow_uri: str) -> MetricsLog:
    client = MlflowClient(mlflow_uri)
    return MetricsLog(client, client.create_run("0").info.run_id)


def test_artifacts_show_the_latest_step_during_and_after_the_run(prefect_server: str, mlflow_uri: str) -> None:
    log = new_log(mlflow_uri)

    @flow
    def train() -> Any:
        run_id = flow_run_id()
        with RunPage("My run", 2, 4, log) as page:
            progress = wait_for_artifact(run_id, "progress-my-run", "2 of 4 steps")
            assert (progress.type, progress.data) == ("progress", 50.0)
            assert progress.description == "My run: 2 of 4 steps"
            assert "terms-my-run" not in artifacts_of(run_id)  # no step has evaluated a term yet

            page.advance(STEPS[0])
            progress = wait_for_artifact(run_id, "progress-my-run", "3 of 4 steps")
            assert progress.data == 75.0
            assert progress.description == "My run: 3 of 4 steps, loss/total 2, train_mean_nll 0.25"
            terms = wait_for_artifact(run_id, "terms-my-run", "after 3 steps")
            assert term_rows(terms) == [["base", "2", "1", "2", "75.0%", "+1.000"], KL_ROW]

            page.advance(STEPS[1])
        return run_id

    final = artifacts_of(train())
    assert set(final) == {"progress-my-run", "terms-my-run"}  # a browser cannot open SQLite, so there is no MLflow link
    assert final["progress-my-run"].data == 100.0
    assert final["progress-my-run"].description == "My run: 4 of 4 steps, loss/total 1, train_mean_nll 0.25"
    assert final["terms-my-run"].type == "table"
    assert final["terms-my-run"].description == "Terms of My run after 4 steps"
    # The base loss has its new value; the KL term keeps the values of the last step that evaluated it.
    assert term_rows(final["terms-my-run"]) == [["base", "1", "1", "1", "75.0%", "+1.000"], KL_ROW]


def test_process_that_lost_the_run_leaves_its_page_alone(prefect_server: str, mlflow_uri: str) -> None:
    def lose_run() -> None:
        if is_lost:
            raise LostRunError("The run is being written by another process.")

    is_lost = False
    client = MlflowClient(mlflow_uri)
    log = MetricsLog(client, client.create_run("0").info.run_id, lose_run)

    @flow
    def train() -> Any:
        nonlocal is_lost
        with RunPage("Lost run", 0, 4, log) as page:
            wait_for_artifact(flow_run_id(), "progress-lost-run", "0 of 4 steps")
            is_lost = True
            page.advance(STEPS[0])
        return flow_run_id()

    page = artifacts_of(train())
    assert set(page) == {"progress-lost-run"}
    assert page["progress-lost-run"].data == 0.0


def test_link_leads_to_the_mlflow_run(prefect_server: str, tmp_path: Path) -> None:
    with running_mlflow(tmp_path) as url:
        log = new_log(url)

        @flow
        def train() -> Any:
            with RunPage("My run", 0, 1, log) as page:
                page.advance(STEPS[1])
            return flow_run_id()

        link = artifacts_of(train())["mlflow-my-run"]
        assert link.type == "markdown"
        assert link.data == f"[MLflow run of My run]({url}/#/experiments/0/runs/{log.run_id})"
        run = httpx.get(f"{url}/api/2.0/mlflow/runs/get", params={"run_id": log.run_id}, timeout=60).json()["run"]
        assert run["info"]["experiment_id"] == "0"


@contextmanager
def prefect_proxy(prefect_server: str) -> Iterator[Proxy]:
    """Route the Prefect client of this process through a proxy that can drop requests."""
    proxy = Proxy(free_port(), int(urlsplit(prefect_server).port or 0))
    with Proxies({"prefect": proxy}), temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{proxy.port}/api"}):
        yield proxy
        deliver_events()  # before the proxy closes; later tests would wait for these events


def fail_artifact_requests(proxy: Proxy, number: int, action: str) -> list[Armed]:
    """Fail the next requests that create an artifact. Prefect's client repeats a dropped one, but not one with 500."""
    return [proxy.arm(Fault(0, 0.0, "prefect", action, 0, 0.0), "/api/artifacts/") for _ in range(number)]


def wait_for_drops(drops: Sequence[Armed]) -> None:
    deadline = time.monotonic() + 60
    while not all(drop.hit for drop in drops):
        assert time.monotonic() < deadline, drops
        time.sleep(0.05)


@pytest.mark.parametrize("recovers", [True, False])
def test_run_continues_when_the_prefect_server_drops_requests(
    prefect_server: str, mlflow_uri: str, recovers: bool
) -> None:
    log = new_log(mlflow_uri)
    with prefect_proxy(prefect_server) as proxy:

        @flow
        def train() -> Any:
            drops = fail_artifact_requests(proxy, 2 if recovers else 1000, "drop request")
            with RunPage("dropped", 0, 2, log) as page:
                wait_for_drops(drops[:2])
                if recovers:
                    wait_for_artifact(flow_run_id(), "progress-dropped", "0 of 2 steps")
                    drops += fail_artifact_requests(proxy, 2, "500")  # of the last update
                for metrics in STEPS:
                    page.advance(metrics)
            if recovers:
                assert all(drop.hit for drop in drops)
            return flow_run_id()

        run_id = train()
    shown = artifacts_of(run_id)
    if recovers:
        assert shown["progress-dropped"].data == 100.0
        assert shown["terms-dropped"].description == "Terms of dropped after 2 steps"
    else:
        assert shown == {}


def test_no_artifacts_outside_a_flow_run(prefect_server: str, mlflow_uri: str) -> None:
    with RunPage("outside", 0, 2, new_log(mlflow_uri)) as page:
        page.advance(STEPS[0])
    keys = ["progress-outside", "terms-outside", "mlflow-outside"]
    assert artifacts(ArtifactFilter(key=ArtifactFilterKey(any_=keys))) == {}


def test_terms_after_one_step_are_in_the_singular(monkeypatch: pytest.MonkeyPatch) -> None:
    log: Any = None
    page, descriptions = RunPage("demo", 0, 2, log), list[str]()
    monkeypatch.setattr(page, "_put", lambda client, kind, form, data, description: descriptions.append(description))
    for text in ("after 1 step", "after 2 steps"):
        page.advance(STEPS[0])
        page._update(log)
        assert descriptions[-1] == f"Terms of demo {text}"
