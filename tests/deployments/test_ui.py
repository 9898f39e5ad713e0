"""A person opens the Prefect UI in a browser, changes a run's form, is refused, submits, and watches the run end.

TINKER_FLOWS_SCREENSHOTS=1 keeps what the browser shows as docs/images/ui-*.png.
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
from browser import RunForm, browser, link_of, page_text, screenshot, wait_for, wait_for_text
from mlflow_process import running_mlflow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect_deployments import deploy, process_worker, run_to_its_end, wait_for_end
from pydantic import SecretStr
from selenium.webdriver.remote.webdriver import WebDriver

from blocks.service import TinkerService

IMAGES = Path(__file__).parents[2] / "docs" / "images"
KEEPS = os.environ.get("TINKER_FLOWS_SCREENSHOTS") == "1"


def keep(driver: WebDriver, name: str, height: int = 900) -> None:
    if KEEPS:
        screenshot(driver, IMAGES / f"ui-{name}.png", height)


@pytest.fixture(scope="module")
def servers(prefect_server: str, engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Everything that a run from the form needs; the key to the service is in a block and nowhere else."""
    folder = tmp_path_factory.mktemp("ui")
    TinkerService(base_url=engine_url, api_key=SecretStr("tml-test")).save("of-the-team", overwrite=True)
    deploy(prefect_server, "--name", "sft")
    with running_mlflow(folder) as mlflow, process_worker(prefect_server, folder / "home", folder / "worker.log"):
        yield {"ui": prefect_server.removesuffix("/api"), "mlflow": mlflow, "worker": str(folder / "worker.log")}


def deployment_id(name: str) -> UUID:
    with get_client(sync_client=True) as client:
        return client.read_deployment_by_name(f"{name}/{name}").id


def runs_of(deployment: UUID) -> list[FlowRun]:
    with get_client(sync_client=True) as client:
        return [run for run in client.read_flow_runs() if run.deployment_id == deployment]


def submitted(form: RunForm, driver: WebDriver, deployment: UUID) -> UUID:
    """Submit, and again where nothing came of it: after a refusal the form only takes back what it said.

    A server that is too busy is another cause; the form says that it failed, and leaves the rest to a person.
    """

    def try_it() -> FlowRun | None:
        if driver.current_url.endswith("/run"):
            form.submit()
            time.sleep(6.0)
        return next(iter(runs_of(deployment)), None)

    return wait_for(try_it, "that the run is scheduled", 240).id


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_is_started_from_its_form_and_seen_to_complete(servers: dict[str, str]) -> None:
    deployment = deployment_id("sft")
    with browser() as driver:
        form = RunForm(driver, servers["ui"], str(deployment))
        keep(driver, "form")
        topology, *_ = form.items("Regularizers")

        form.fill_in("Weight", "-1", topology)
        form.submit()
        wait_for_text(
            driver, "'config.objective.regularizers[0].weight'. Failure reason: -1 is less than the minimum of 0"
        )
        keep(driver, "refused")
        assert not runs_of(deployment)

        form.fill_in("Weight", "3.5", topology)
        third = form.add_item("Regularizers")
        offered = form.choose("Name", "confidence", third)
        assert {"confidence", "kl", "topology"} <= set(offered)
        form.fill_in("Weight", "0.5", third)
        keep(driver, "regularizer", 1000)
        form.fill_in("Run name", "from-the-form")
        form.fill_in("Tinker service", "block:of-the-team")
        form.fill_in("MLflow tracking", servers["mlflow"])
        flow_run_id = submitted(form, driver, deployment)

        page = f"{servers['ui']}/v2/runs/flow-run/{flow_run_id}?tab=Artifacts"
        wait_for(lambda: artifacts(servers["ui"], flow_run_id), "artifacts of the run under way", 400)
        see(driver, page, ["progress-from-the-form"])
        keep(driver, "running", 1000)
        run = wait_for_end(flow_run_id, 600)
        assert run.state is not None
        assert run.state.is_completed(), (run.state.message, Path(servers["worker"]).read_text()[-3000:])
        see(driver, page, [f"{kind}-from-the-form" for kind in ("progress", "terms", "mlflow", "report")])
        assert "Completed" in page_text(driver)
        see_artifacts(driver, servers, flow_run_id)
    spec = run.parameters["config"]["objective"]["regularizers"]
    assert [(each["name"], each["weight"]) for each in spec] == [("topology", 3.5), ("logic", 2), ("confidence", 0.5)]


def see(driver: WebDriver, page: str, texts: list[str]) -> None:
    """Open a page; it does not follow its run, so that a person would load it again, too."""

    def shown() -> bool:
        driver.get(page)
        try:
            wait_for_text(driver, texts[-1], 20)
        except AssertionError:
            return False
        return all(text in page_text(driver) for text in texts)

    wait_for(shown, repr(texts), 200)


def see_artifacts(driver: WebDriver, servers: dict[str, str], flow_run_id: UUID) -> None:
    """Each one on its own page; the link leads to the run in MLflow."""
    found = {each["key"]: each for each in artifacts(servers["ui"], flow_run_id)}
    assert found["progress-from-the-form"]["data"] == 100
    page = f"{servers['ui']}/v2/artifacts/artifact/"
    driver.get(page + found["terms-from-the-form"]["id"])
    for text in ("share of gradient", "topology", "3.5", "logic", "confidence", "0.5"):
        wait_for_text(driver, text)
    keep(driver, "terms", 700)
    driver.get(page + found["report-from-the-form"]["id"])
    wait_for_text(driver, "factor for half of the gradient")
    driver.get(page + found["mlflow-from-the-form"]["id"])
    wait_for_text(driver, "MLflow run of from-the-form")
    link = wait_for(lambda: link_of(driver, "MLflow run of from-the-form"), "the link to the run")
    assert link.startswith(f"{servers['mlflow']}/#/experiments/")
    mlflow_run = httpx.get(f"{servers['mlflow']}/api/2.0/mlflow/runs/get", params={"run_id": link.rpartition("/")[2]})
    assert mlflow_run.json()["run"]["info"]["run_name"] == "from-the-form"
    driver.get(link)
    wait_for_text(driver, "from-the-form", 120)


def artifacts(ui: str, flow_run_id: UUID) -> list[dict[str, Any]]:
    wanted = {"artifacts": {"flow_run_id": {"any_": [str(flow_run_id)]}}}
    return httpx.post(f"{ui}/api/artifacts/filter", json=wanted, timeout=30).json()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_the_form_lets_pass_is_refused_by_the_flow_in_a_sentence(servers: dict[str, str]) -> None:
    """The server takes an unknown parameter, and knows nothing of a term's own parameters."""
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
