"""Prefect UI in a browser: change the form of a run, see a validation error, submit, and follow the run to its end.

TINKER_FLOWS_SCREENSHOTS=1 saves screenshots as docs/images/ui-*.png.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from browser import RunForm, browser, link_of, page_text, screenshot, wait_for_text
from mlflow_process import running_mlflow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect_deployments import deploy, process_worker, run_to_its_end, wait_for_end
from pydantic import SecretStr
from selenium.webdriver.remote.webdriver import WebDriver
from waiting import wait_for

from blocks.service import TinkerService
from blocks.tracking import MLflowTracking

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SAVES_SCREENSHOTS = os.environ.get("TINKER_FLOWS_SCREENSHOTS") == "1"


def save_screenshot(driver: WebDriver, name: str, height: int = 900) -> None:
    if SAVES_SCREENSHOTS:
        screenshot(driver, IMAGES / f"ui-{name}.png", height)


@pytest.fixture(scope="module")
def servers(prefect_server: str, engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Servers for a run from the form, which names them by blocks: it may not name servers of its own."""
    folder = tmp_path_factory.mktemp("ui")
    TinkerService(base_url=engine_url, api_key=SecretStr("tml-test")).save("of-the-team", overwrite=True)
    deploy(prefect_server, "--name", "sft")
    with running_mlflow(folder) as mlflow, process_worker(prefect_server, folder / "home", folder / "worker.log"):
        MLflowTracking(tracking_uri=mlflow).save("of-the-team", overwrite=True)
        yield {"ui": prefect_server.removesuffix("/api"), "mlflow": mlflow, "worker": str(folder / "worker.log")}


def deployment_id(name: str) -> UUID:
    with get_client(sync_client=True) as client:
        return client.read_deployment_by_name(f"{name}/{name}").id


def runs_of(deployment: UUID) -> list[FlowRun]:
    with get_client(sync_client=True) as client:
        return [run for run in client.read_flow_runs() if run.deployment_id == deployment]


def submit(form: RunForm, driver: WebDriver, deployment: UUID) -> UUID:
    """Submit the form until a run exists.

    The first submission after a validation error only clears the error, and a busy server can reject a submission.
    """

    earlier = {run.id for run in runs_of(deployment)}

    def try_to_submit() -> FlowRun | None:
        if driver.current_url.endswith("/run"):
            form.submit()
            time.sleep(6.0)
        return next((run for run in runs_of(deployment) if run.id not in earlier), None)

    return wait_for(try_to_submit, "the scheduled run", 240).id


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_from_the_form_completes(servers: dict[str, str]) -> None:
    deployment = deployment_id("sft")
    earlier = runs_of(deployment)  # of other tests
    with browser() as driver:
        form = RunForm(driver, servers["ui"], str(deployment))
        save_screenshot(driver, "form")
        topology, *_ = form.items("Regularizers")

        form.fill_in("Weight", "-1", topology)
        form.submit()
        wait_for_text(
            driver, "'config.objective.regularizers[0].weight'. Failure reason: -1 is less than the minimum of 0"
        )
        save_screenshot(driver, "refused")
        assert len(runs_of(deployment)) == len(earlier)

        form.fill_in("Weight", "3.5", topology)
        third = form.add_item("Regularizers")
        options = form.choose("Name", "confidence", third)
        assert {"confidence", "kl", "topology"} <= set(options)
        form.fill_in("Weight", "0.5", third)
        save_screenshot(driver, "regularizer", 1000)
        form.fill_in("Run name", "from-the-form")
        form.fill_in("Tinker service", "block:of-the-team")
        form.fill_in("MLflow tracking", "block:of-the-team")
        flow_run_id = submit(form, driver, deployment)

        page = f"{servers['ui']}/v2/runs/flow-run/{flow_run_id}?tab=Artifacts"
        wait_for(lambda: artifacts(servers["ui"], flow_run_id), "artifacts of the run under way", 400)
        see(driver, page, ["progress-from-the-form"])
        save_screenshot(driver, "running", 1000)
        run = wait_for_end(flow_run_id, 600)
        assert run.state is not None
        assert run.state.is_completed(), (run.state.message, Path(servers["worker"]).read_text()[-3000:])
        see(driver, page, [f"{kind}-from-the-form" for kind in ("progress", "terms", "mlflow", "report")])
        assert "Completed" in page_text(driver)
        see_artifacts(driver, servers, flow_run_id)
    spec = run.parameters["config"]["objective"]["regularizers"]
    assert [(term["name"], term["weight"]) for term in spec] == [("topology", 3.5), ("logic", 2), ("confidence", 0.5)]


def see(driver: WebDriver, page: str, texts: list[str]) -> None:
    """Load a page until it shows the texts; the page does not refresh itself."""

    def shows_texts() -> bool:
        driver.get(page)
        try:
            wait_for_text(driver, texts[-1], 20)
        except AssertionError:
            return False
        return all(text in page_text(driver) for text in texts)

    wait_for(shows_texts, repr(texts), 200)


def see_artifacts(driver: WebDriver, servers: dict[str, str], flow_run_id: UUID) -> None:
    """Check the page of each artifact; the link must lead to the run in MLflow."""
    by_key = {artifact["key"]: artifact for artifact in artifacts(servers["ui"], flow_run_id)}
    assert by_key["progress-from-the-form"]["data"] == 100
    page = f"{servers['ui']}/v2/artifacts/artifact/"
    driver.get(page + by_key["terms-from-the-form"]["id"])
    for text in ("share of gradient", "topology", "3.5", "logic", "confidence", "0.5"):
        wait_for_text(driver, text)
    save_screenshot(driver, "terms", 700)
    driver.get(page + by_key["report-from-the-form"]["id"])
    for text in ("factor for half of the gradient", "medians over the last"):
        wait_for_text(driver, text)
    driver.get(page + by_key["mlflow-from-the-form"]["id"])
    wait_for_text(driver, "MLflow run of from-the-form")
    link = wait_for(lambda: link_of(driver, "MLflow run of from-the-form"), "the link to the run")
    assert link.startswith(f"{servers['mlflow']}/#/experiments/")
    mlflow_run = httpx.get(f"{servers['mlflow']}/api/2.0/mlflow/runs/get", params={"run_id": link.rpartition("/")[2]})
    assert mlflow_run.json()["run"]["info"]["run_name"] == "from-the-form"
    driver.get(link)
    wait_for_text(driver, "from-the-form", 120)


def artifacts(ui: str, flow_run_id: UUID) -> list[dict[str, Any]]:
    query = {"artifacts": {"flow_run_id": {"any_": [str(flow_run_id)]}}}
    return httpx.post(f"{ui}/api/artifacts/filter", json=query, timeout=30).json()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_flow_rejects_errors_that_the_form_accepts(servers: dict[str, str]) -> None:
    """The server accepts an unknown parameter and does not validate the parameters of a term."""
    deployment = deployment_id("sft")
    with get_client(sync_client=True) as client:
        config = client.read_deployment(deployment).parameters["config"]
    unknown = run_to_its_end(deployment, {"config": config, "learning_rate": 1})
    assert unknown.state is not None
    assert unknown.state.is_crashed()  # Prefect cannot call the flow at all; the worker's log has the reason
    assert "learning_rate" in Path(servers["worker"]).read_text()
    terms = [{"name": "topology", "params": {"alfa": 1}}]
    wrong = run_to_its_end(deployment, {"config": {**config, "objective": {"regularizers": terms}}})
    assert wrong.state is not None
    assert "The parameters of term 'topology' are wrong: 'alfa'" in (wrong.state.message or "")
