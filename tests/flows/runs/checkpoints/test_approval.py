"""Approval of a promotion by a person: in the terminal, or in the form of a suspended flow run, also in a browser."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from browser import Form, browser, wait_for_text
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.input import keyset_from_paused_state
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_deployments import deploy, process_worker, wait_for_end
from rlhf_config import rlhf_fields
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.select import Select
from sft_config import sft_fields
from waiting import wait_for

from blocks.errors import ConfigError
from blocks.servers.processes import local_prefect_server
from flows.config.loader import validate_fields
from flows.config.rlhf import RlhfConfig
from flows.config.train import SftConfig
from flows.monitoring.run_tags import APPROVAL_TAG, REJECTED_TAG
from flows.rlhf import rlhf
from flows.runs.result import TrainResult
from flows.sft import sft
from flows.sweeps.config import SweepConfig
from flows.sweeps.plan import make_plan

pytestmark = pytest.mark.usefixtures("api_key")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def short_fields(folder: Path, run_name: str, tracking: str, base_url: str = "local") -> dict[str, Any]:
    short = {"objective": {}, "num_steps": 2, "eval_every": 2, "register_as": run_name, "needs_approval": True}
    return sft_fields(folder, run_name, tracking, base_url) | short


def evaluation_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of an evaluation that registers the checkpoint of a run after approval."""
    places = {key: fields[key] for key in ("base_url", "storage", "tracking", "data")}
    own = {"run_name": "evaluated", "register_as": "evaluated", "needs_approval": True}
    return places | own | {"checkpoint": f"{fields['run_name']}@2"}


def versions(tracking: str, name: str) -> list[Any]:
    return MlflowClient(tracking).search_model_versions(f"name = '{name}'")


def tags_of(result: TrainResult) -> dict[str, str]:
    return MlflowClient(result.tracking_uri).get_run(result.mlflow_run_id).data.tags


@pytest.mark.usefixtures("prefect_server")
class TestTerminal:
    """Run from a terminal, or from a script without one."""

    @pytest.fixture
    def fields(self, tmp_path: Path, mlflow_uri: str, engine_url: str, request: Any) -> dict[str, Any]:
        return short_fields(tmp_path, request.function.__name__, mlflow_uri, engine_url)

    def test_without_a_terminal_the_run_ends_with_the_command_that_continues(
        self, fields: dict[str, Any], mlflow_uri: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        name = fields["run_name"]
        waiting = sft(SftConfig.model_validate(fields))
        assert waiting.not_promoted.startswith("The checkpoint at step 2 is not promoted: it waits for approval")
        assert f"`tinker-flows resume {name} --storage {fields['storage']}`" in waiting.not_promoted
        assert tags_of(waiting)[REJECTED_TAG] == waiting.not_promoted
        assert versions(mlflow_uri, name) == []

        monkeypatch.setattr("sys.stdin", Terminal("yes\nlater\n"))
        assert sft(SftConfig.model_validate(fields)).not_promoted == waiting.not_promoted
        monkeypatch.setattr("sys.stdin", Terminal("approve\n"))
        capsys.readouterr()
        approved = sft(SftConfig.model_validate(fields))
        assert approved.not_promoted == ""
        assert approved.approval_request is None
        (nll,) = [row for row in waiting.held_out if row.metric == "nll"]
        shown = capsys.readouterr().err
        assert nll.describe_change() in shown
        assert f"Register the checkpoint at step 2 of {name} as a version of {name}?" in shown
        assert [version.run_id for version in versions(mlflow_uri, name)] == [approved.mlflow_run_id]
        assert tags_of(approved)[APPROVAL_TAG] == "approve"
        assert REJECTED_TAG not in tags_of(approved)

        monkeypatch.setattr("sys.stdin", Terminal(""))  # the decision is recorded, and nothing is asked again
        assert sft(SftConfig.model_validate(fields)).not_promoted == ""
        assert len(versions(mlflow_uri, name)) == 1

    def test_refused_checkpoint_is_not_registered(
        self, fields: dict[str, Any], mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.stdin", Terminal("refuse\n"))
        refused = sft(SftConfig.model_validate(fields))
        assert refused.not_promoted == "The checkpoint at step 2 is not promoted: a person refused it."
        assert refused.resumed_from == 0
        assert versions(mlflow_uri, fields["run_name"]) == []
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(refused.flow_run_id)).state
        assert state is not None
        assert (state.name, state.message) == ("NotPromoted", refused.not_promoted)
        monkeypatch.setattr("sys.stdin", Terminal(""))  # the decision is recorded, and nothing is asked again
        assert sft(SftConfig.model_validate(fields)).not_promoted == refused.not_promoted
        assert sft(SftConfig.model_validate(fields | {"needs_approval": False})).not_promoted == ""
        assert len(versions(mlflow_uri, fields["run_name"])) == 1

    @pytest.mark.parametrize("reuse", [{"if_exists": "delete"}, {"resume": "never"}])
    def test_decision_is_about_the_run_that_was_trained(
        self,
        tmp_path: Path,
        mlflow_uri: str,
        engine_url: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: Any,
        reuse: dict[str, str],
    ) -> None:
        """Neither `if_exists: delete` nor `resume: never` applies to it when it is opened again for the promotion."""
        name = "-".join(reuse.values())
        monkeypatch.setattr("sys.stdin", Terminal("approve\n"))
        result = sft(SftConfig.model_validate(short_fields(tmp_path, name, mlflow_uri, engine_url) | reuse))
        assert result.not_promoted == ""
        assert [version.run_id for version in versions(mlflow_uri, name)] == [result.mlflow_run_id]
        assert "Deleted" not in capsys.readouterr().err

    def test_failed_condition_asks_nobody(self, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", Terminal(""))
        result = sft(SftConfig.model_validate(fields | {"promote_if": "test/nll < 0.01"}))
        assert "promote_if requires" in result.not_promoted
        assert result.approval_request is None


def test_setting_without_effect_is_refused(tmp_path: Path) -> None:
    fields = short_fields(tmp_path, "run", "")
    with pytest.raises(ConfigError, match="'needs_approval' is True, but it needs register_as"):
        validate_fields(SftConfig, fields | {"register_as": None})
    base = {key: value for key, value in fields.items() if key != "run_name"}
    sweep = {"run_name": "sweep", "flow": "sft", "base": base, "space": {"learning_rate": [1e-3, 1e-2]}}
    with pytest.raises(ConfigError, match="no person can be asked about each trial"):
        make_plan(SweepConfig.model_validate(sweep))
    rlhf_config = rlhf_fields(tmp_path, "human", "")
    rlhf_config["warm_start"] |= {"register_as": "warm", "needs_approval": True}
    with pytest.raises(ConfigError, match="a stage must not set needs_approval"):
        validate_fields(RlhfConfig, rlhf_config)


@pytest.mark.usefixtures("prefect_server")
def test_rlhf_asks_between_its_stages(
    tmp_path: Path, mlflow_uri: str, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = rlhf_fields(tmp_path, "asked", mlflow_uri, engine_url) | {"needs_approval": True}
    fields["reward"]["training"] |= {"register_as": "asked-reward"}
    config = RlhfConfig.model_validate(fields)
    result = rlhf(config)
    waits = "asked-sft waits for approval: run this rlhf again in a terminal."
    assert (result.run_name, result.not_promoted) == ("asked-sft", waits)
    monkeypatch.setattr("sys.stdin", Terminal("approve\nrefuse\n"))
    result = rlhf(config)
    refused = "The checkpoint at step 2 is not promoted: a person refused it."
    assert (result.run_name, result.not_promoted) == ("asked-reward", refused)
    (tmp_path / "runs" / "asked-reward" / "approval.json").unlink()
    monkeypatch.setattr("sys.stdin", Terminal("approve\n"))
    assert rlhf(config).run_name == "asked-policy"
    assert len(versions(mlflow_uri, "asked-reward")) == 1


def suspended(flow_run_id: UUID) -> FlowRun | None:
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(flow_run_id)
    return run if run.state and run.state.name == "Suspended" else None


def start(name: str, fields: dict[str, Any]) -> UUID:
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(f"{name}/{name}")
        return client.create_flow_run_from_deployment(deployment.id, parameters={"config": fields}).id


def answer(flow_run_id: UUID, **form: str) -> None:
    """Send the form of a suspended flow run as the UI does."""
    with get_client(sync_client=True) as client:
        result = client.resume_flow_run(flow_run_id, run_input=form)
    assert result.status.value == "ACCEPT", result


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_suspended_run_survives_a_restart_of_server_and_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow runs of a worker are suspended, and continue after the form was sent to the restarted server."""
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    tracking, log = f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "worker.log"
    fields = short_fields(tmp_path, "held", tracking) | {"max_restarts": 0}
    staged = rlhf_fields(tmp_path, "staged", tracking) | {"needs_approval": True, "judge": None}
    with local_prefect_server() as api, temporary_settings({PREFECT_API_URL: api}):
        for name in ("sft", "rlhf", "evaluate"):
            deploy(api, "--name", name)
        with process_worker(api, tmp_path / "home", log):
            first, stages = start("sft", fields), start("rlhf", staged)
            run = wait_for(lambda: suspended(first), "a suspended run", 240)
            wait_for(lambda: suspended(stages), "a suspended rlhf", 240)
            evaluation = start("evaluate", evaluation_fields(fields))
            wait_for(lambda: suspended(evaluation), "a suspended evaluation", 240)
        assert run.state is not None
        with get_client(sync_client=True) as client:
            key = keyset_from_paused_state(run.state)["description"]
            description = client.read_flow_run_input(first, key)
        assert "Register the checkpoint at step 2 of held as a version of held?" in description
        assert "| nll |" in description
    assert versions(tracking, "held") == []

    with local_prefect_server() as api, temporary_settings({PREFECT_API_URL: api}):
        with pytest.raises(AssertionError, match="REJECT"):
            answer(first)
        answer(first, decision="approve", reason="better")
        answer(stages, decision="refuse", reason="too early")
        answer(evaluation, decision="approve", reason="measured")
        with process_worker(api, tmp_path / "home", log):
            ended = [wait_for_end(flow_run_id, 240).state for flow_run_id in (first, stages, evaluation)]
    states = [state and state.name for state in ended]
    assert states == ["Completed", "NotPromoted", "Completed"], log.read_text()[-3000:]
    assert ended[1] is not None
    assert ended[1].message == "staged-sft ends the flow: a person decided 'refuse: too early'."
    (version,) = versions(tracking, "held")
    assert MlflowClient(tracking).get_run(version.run_id).data.tags[APPROVAL_TAG] == "approve: better"
    (version,) = versions(tracking, "evaluated")
    client = MlflowClient(tracking)
    assert client.get_run(version.run_id).data.tags[APPROVAL_TAG] == "approve: measured"
    # It was evaluated once, before it was suspended.
    assert len(client.get_metric_history(version.run_id, "test/nll")) == 1


def answer_in_ui(driver: WebDriver, ui: str, flow_run_id: UUID, decision: str, reason: str) -> str:
    """Send the form on the page of a suspended flow run, and return the text of the form."""
    driver.get(f"{ui}/runs/flow-run/{flow_run_id}")
    wait_for_text(driver, "Suspended")
    click(driver, "//button[normalize-space()='Resume']")
    wait_for_text(driver, "Decision")
    form = driver.find_element(By.XPATH, "//div[@role='dialog']")
    text = form.text
    Select(form.find_element(By.TAG_NAME, "select")).select_by_visible_text(decision)
    form.find_element(By.TAG_NAME, "textarea").send_keys(reason)
    click(driver, "//div[@role='dialog']//button[normalize-space()='Submit']")
    return text


def answer_in_v2_ui(driver: WebDriver, ui: str, flow_run_id: UUID, decision: str, reason: str) -> str:
    """Do the same in Prefect's new UI."""
    driver.get(f"{ui}/v2/runs/flow-run/{flow_run_id}")
    wait_for_text(driver, "Suspended")
    click(driver, "//button[normalize-space()='Open menu']")
    click(driver, "//*[@role='menuitem'][normalize-space()='Resume']")
    wait_for_text(driver, "Decision")
    text = driver.find_element(By.XPATH, "//*[@role='dialog']").text
    form = Form(driver)
    form.choose("Decision", decision)
    form.fill_in("Reason", reason)
    form.submit("Resume")
    return text


def click(driver: WebDriver, path: str) -> None:
    wait_for(lambda: driver.find_elements(By.XPATH, path), path)[0].click()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_form_is_answered_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run is approved in Prefect's UI, and another one is refused in its new UI."""
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    tracking, log = f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "worker.log"
    with local_prefect_server() as api, temporary_settings({PREFECT_API_URL: api}), browser() as driver:
        deploy(api, "--name", "sft")
        runs = {name: start("sft", short_fields(tmp_path, name, tracking)) for name in ("better", "worse")}
        with process_worker(api, tmp_path / "home", log):
            for flow_run_id in runs.values():
                wait_for(lambda run=flow_run_id: suspended(run), "a suspended run", 240)
            ui = api.removesuffix("/api")
            shown = {
                "better": answer_in_ui(driver, ui, runs["better"], "approve", "lower NLL"),
                "worse": answer_in_v2_ui(driver, ui, runs["worse"], "refuse", "too long"),
            }
            ended = {name: wait_for_end(flow_run_id, 240).state for name, flow_run_id in runs.items()}
    for name, text in shown.items():
        assert f"Register the checkpoint at step 2 of {name} as a version of {name}?" in text
        assert "nll" in text
    states = {name: (state.name, state.message) for name, state in ended.items() if state}
    assert states["better"][0] == "Completed", log.read_text()[-3000:]
    refused = "The checkpoint at step 2 is not promoted: a person refused it (too long)."
    assert states["worse"] == ("NotPromoted", refused)
    (version,) = versions(tracking, "better")
    assert MlflowClient(tracking).get_run(version.run_id).data.tags[APPROVAL_TAG] == "approve: lower NLL"
    assert versions(tracking, "worse") == []
