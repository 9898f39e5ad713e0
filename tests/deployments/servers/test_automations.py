"""Automations of a real Prefect server: crash detection, restart, stop on a warning, notification."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psutil
import pytest
import yaml
from mlflow import MlflowClient
from prefect import flow, tags
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse, SetStateStatus
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.context import FlowRunContext, TagsContext
from prefect.events.actions import RunDeployment
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.flow_runs import suspend_flow_run
from prefect.server.utilities.user_templates import render_user_template_sync
from prefect.states import Cancelling, Crashed, Running, Scheduled, Suspended
from pydantic import SecretStr
from sft_config import sft_fields
from waiting import wait_for

from deployments.servers.automations import (
    EVALUATE_TAG,
    NOTIFY_TAG,
    PAUSE_TAG,
    RESTART_TAG,
    STOP_TAG,
    WEBHOOK_BLOCK,
    crash_automation,
    crash_loop_automation,
    evaluate_automation,
    install,
    install_all,
    pause_automation,
    restart_automation,
)
from flows.config.train import SftConfig
from flows.monitoring.events import emit
from flows.sft import sft

ROOT = Path(__file__).parents[3]
SERVE = f"""
import json, sys
from flows.sft import sft
sft.serve(
    name="restarted", tags=["{RESTART_TAG}"], parameters={{"config": json.loads(sys.argv[1])}},
    print_starting_message=False,
)
"""


def fields(folder: Path, run_name: str, base_url: str) -> dict[str, Any]:
    long = {"num_steps": 120, "num_epochs": 40, "eval_every": 0, "checkpoint_every": 4, "objective": {}}
    return sft_fields(folder, run_name, f"sqlite:///{folder / 'mlflow.db'}", base_url) | long


def environment(api: str) -> dict[str, str]:
    return {**os.environ, "PREFECT_API_URL": api, "TINKER_API_KEY": "tml-test"}


def flow_run(run_name: str) -> FlowRun | None:
    with get_client(sync_client=True) as client:
        name = FlowRunFilter(name=FlowRunFilterName(any_=[run_name]))
        return next(iter(client.read_flow_runs(flow_run_filter=name)), None)


def completed(run_name: str) -> FlowRun | None:
    run = flow_run(run_name)
    return run if run and run.state and run.state.is_completed() else None


def checkpoints(folder: Path, run_name: str) -> list[dict[str, Any]]:
    path = folder / "runs" / run_name / "checkpoints.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_a_killed_terminal_run_is_crashed_within_two_minutes(
    tmp_path: Path, prefect_server: str, engine_url: str
) -> None:
    install(crash_automation())
    install(crash_automation())  # installing again replaces it
    with get_client(sync_client=True) as client:
        assert [automation.name for automation in client.read_automations_by_name("tinker-flows: crashed")]
    config = tmp_path / "sft.yaml"
    config.write_text(yaml.safe_dump(fields(tmp_path, "killed-in-a-terminal", engine_url)))
    command = [sys.executable, "-m", "flows.sft", "--config", str(config)]
    process = subprocess.Popen(command, env=environment(prefect_server), cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for(lambda: checkpoints(tmp_path, "killed-in-a-terminal"), "a checkpoint", 120)
    process.kill()
    process.wait()
    run = flow_run("killed-in-a-terminal")
    assert run is not None
    assert run.state is not None
    assert run.state.is_running()
    wait_for(lambda: (r := flow_run("killed-in-a-terminal")) and r.state and r.state.is_crashed(), "CRASHED", 120)


@contextmanager
def serving(api: str, program: str, config: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Serve a deployment with a program that reads its config from the command line."""
    command = [sys.executable, "-c", program, json.dumps(config)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    service = {"TINKER_BASE_URL": config["base_url"]}
    process = subprocess.Popen(command, env=environment(api) | service, cwd=ROOT, **quiet)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def served_run(api: str, config: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a served deployment until its first checkpoint; yields the serving process."""
    with serving(api, SERVE, config) as process:
        with get_client(sync_client=True) as client:
            deployment = wait_for(lambda: next(iter(client.read_deployments()), None), "a deployment", 90)
            name = config["run_name"]
            client.create_flow_run_from_deployment(deployment.id, parameters={"config": config}, name=name)
        wait_for(lambda: checkpoints(Path(config["storage"]).parent, name), "a checkpoint", 120)
        yield process


@pytest.fixture
def idle_run(prefect_server: str) -> Iterator[FlowRun]:
    """Run of a tagged deployment that no worker picks up."""
    with get_client(sync_client=True) as client:
        flow_id = client.create_flow_from_name("idle")
        deployment = client.create_deployment(flow_id, f"idle-{uuid4().hex[:8]}", tags=[RESTART_TAG])
        yield client.create_flow_run_from_deployment(deployment, name=f"idle-{uuid4().hex[:8]}", tags=[RESTART_TAG])
        client.delete_deployment(deployment)


def states_of(run: FlowRun) -> list[str]:
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(run.id)
    return [state.name or "" for state in sorted(states, key=lambda state: state.timestamp)]


def crash(run: FlowRun) -> bool:
    """Report a crash as a worker does; return whether the server accepts it."""
    with get_client(sync_client=True) as client:
        return client.set_flow_run_state(run.id, Crashed(message="killed")).status == SetStateStatus.ACCEPT


def test_a_crash_that_a_worker_reports_twice_restarts_a_run_once(idle_run: FlowRun) -> None:
    install(restart_automation(after_s=10))
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(idle_run.id, Running(), force=True)
    assert crash(idle_run)
    time.sleep(2)
    assert not crash(idle_run)
    wait_for(lambda: states_of(idle_run)[-1] == "AwaitingRetry", "the restart", 60)
    assert states_of(idle_run) == ["Scheduled", "Running", "Crashed", "AwaitingRetry"]


def test_a_run_that_crashes_again_and_again_fails(idle_run: FlowRun) -> None:
    install(restart_automation(after_s=10))
    install(crash_loop_automation(num_crashes=3))
    for _ in range(3):
        assert crash(idle_run)
        if states_of(idle_run).count("Crashed") < 3:
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(idle_run.id, Scheduled(), force=True)
    wait_for(lambda: states_of(idle_run)[-1] == "Failed", "the failure", 60)
    time.sleep(20)  # twice the time after which a crashed run is restarted
    assert states_of(idle_run)[-1] == "Failed"


@pytest.mark.slow
def test_a_crashed_deployment_run_restarts_and_resumes(tmp_path: Path, prefect_server: str, engine_url: str) -> None:
    install(restart_automation(after_s=10))
    run_name = "killed-on-a-worker"
    with served_run(prefect_server, fields(tmp_path, run_name, engine_url)) as serving:
        for child in psutil.Process(serving.pid).children(recursive=True):
            child.kill()
        run = wait_for(lambda: completed(run_name), "the completed run", 240)
    assert run.run_count == 2
    steps = [record["step"] for record in checkpoints(tmp_path, run_name)]
    assert steps == sorted(set(steps))
    assert checkpoints(tmp_path, run_name)[-1]["final"]


@pytest.mark.slow
def test_a_suspended_and_a_cancelled_deployment_run_save_their_current_step(
    tmp_path: Path, prefect_server: str, engine_url: str
) -> None:
    install(restart_automation(after_s=10))
    run_name = "cancelled-on-a-worker"
    mlflow = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")

    def saved_step() -> float | None:
        """Return the step of the last checkpoint if the run has stopped there."""
        runs = mlflow.search_runs(["1"], "status = 'KILLED'")
        assert all(checkpoints(tmp_path, run_name)[-1]["step"] == of.data.metrics["progress/batch"] + 1 for of in runs)
        return checkpoints(tmp_path, run_name)[-1]["step"] if runs else None

    with served_run(prefect_server, fields(tmp_path, run_name, engine_url) | {"num_steps": 999}):
        run = flow_run(run_name)
        assert run is not None
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run.id, Suspended(timeout_seconds=300), force=True)
            step = wait_for(saved_step, "the suspended run", 60)
            time.sleep(2.0)  # until its process has ended
            client.resume_flow_run(run.id)
            wait_for(lambda: checkpoints(tmp_path, run_name)[-1]["step"] > step, "a checkpoint after it", 120)
            client.set_flow_run_state(run.id, Cancelling())
        wait_for(lambda: (r := flow_run(run_name)) and r.state and r.state.is_cancelled(), "CANCELLED", 60)
        with get_client(sync_client=True) as client:
            states = client.read_flow_run_states(run.id)
    assert "Crashed" not in [state.name for state in states]  # which the automation would restart
    assert saved_step()


@contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run a real HTTP server; yields its URL and the received payloads."""
    received: list[dict[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
def test_webhook_receives_warnings_spent_budgets_and_failures(
    tmp_path: Path, prefect_server: str, engine_url: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    install_all()
    assert f"save a Webhook block named {WEBHOOK_BLOCK!r}" in capsys.readouterr().out
    dominant = [{"name": "confidence", "weight": 1.0}]
    watched = {
        "regularizers": dominant,
        "watch": {"dominance_above": 1e-9, "conflict_below": 0, "patience": 1, "effect_every": 0},
    }
    # The budget is longer than a step, so that a checkpoint exists, and shorter than the run.
    spent = {"objective": watched, "budget": {"hours": 20 / 3600}, "checkpoint_every": 1}
    config = SftConfig.model_validate(fields(tmp_path, "notified", engine_url) | spent)

    @flow
    def broken() -> None:
        raise ValueError('no "quotes" </here>')

    @flow
    def asking() -> None:
        suspend_flow_run()

    def suspend(tags: list[str]) -> None:
        """Suspend a flow run of a new deployment, in this process."""
        with get_client(sync_client=True) as client:
            deployment = client.create_deployment(client.create_flow(asking), f"asking {tags}", tags=tags)
            with suppress(Pause):  # ends the process of a worker
                run_flow(asking, flow_run=client.create_flow_run_from_deployment(deployment))

    with webhook() as (url, received):
        Webhook(url=SecretStr(url)).save(WEBHOOK_BLOCK, overwrite=True)
        install_all()
        with tags(NOTIFY_TAG):
            sft(config)
            broken(return_state=True)
        suspend([NOTIFY_TAG])
        suspend([])
        broken(return_state=True)  # a run without the tag

        def received_all() -> list[dict[str, Any]] | None:
            kinds = {payload["event"] for payload in received}
            due = {"tinker-flows.budget", "prefect.flow-run.Failed", "prefect.flow-run.Suspended"}
            return received if due <= kinds else None

        wait_for(received_all, "every alert", 120)
        time.sleep(2.0)
    by_event = {
        kind: [payload for payload in received if payload["event"] == kind]
        for kind in {payload["event"] for payload in received}
    }
    ends = {"prefect.flow-run.Failed", "prefect.flow-run.Suspended"}
    assert by_event.keys() == {"tinker-flows.dominance", "tinker-flows.budget", *ends}
    assert len(by_event["prefect.flow-run.Suspended"]) == 1
    (dominance,) = by_event["tinker-flows.dominance"]
    assert dominance["run"] == "notified"
    assert dominance["message"].startswith("Term 'confidence' has had more than 0% of the gradient")
    payload = dominance["payload"]
    assert (payload["run_name"], payload["terms"], payload["step"]) == ("notified", ["confidence"], 0)
    assert 0 < payload["share"] <= 1
    (budget,) = by_event["tinker-flows.budget"]
    assert budget["message"].startswith("The run stopped at a checkpoint before step")
    assert {"step", "hours", "num_train_tokens"} <= budget["payload"].keys()
    (failure,) = by_event["prefect.flow-run.Failed"]
    assert 'no "quotes" </here>' in failure["message"]


def test_a_spent_budget_pauses_the_deployment_with_the_tag(prefect_server: str) -> None:
    install(pause_automation())

    @flow
    def spending() -> None:
        emit("budget", "spent", {"step": 3, "usd": 1.0, "message": "The budget is spent."})

    def run_deployment(name: str, tags: list[str]) -> UUID:
        """Run a new scheduled deployment once in this process, as a worker does; return its id."""
        with get_client(sync_client=True) as client:
            flow_id = client.create_flow(spending)
            schedule = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=timedelta(days=1)))
            deployment = client.create_deployment(flow_id, name, tags=tags, schedules=[schedule])
            run_flow(spending, flow_run=client.create_flow_run_from_deployment(deployment))
        return deployment

    untagged, tagged = run_deployment("untagged", []), run_deployment("tagged", [PAUSE_TAG])
    with get_client(sync_client=True) as client:
        wait_for(lambda: client.read_deployment(tagged).paused, "a paused deployment", 60)
        assert not client.read_deployment(untagged).paused


@pytest.mark.slow
def test_a_warning_of_a_trial_stops_its_sweep(prefect_server: str) -> None:
    install_all()
    install_all()  # installing again replaces them

    @flow
    def trial() -> None:
        emit("conflict", "a-trial", {"step": 3, "terms": ["a", "b"], "cosine": -0.5, "message": "they conflict"})

    @flow
    def sweep() -> str:
        own = FlowRunContext.get()
        assert own is not None
        assert own.flow_run is not None
        with TagsContext(current_tags=set()):  # a sweep runs its trials without tags
            trial()
        with get_client(sync_client=True) as client:
            wait_for(
                lambda: (s := client.read_flow_run(own.flow_run.id).state) and s.is_cancelling(),
                "CANCELLING",
                60,
            )
        return "stopped"

    with tags(STOP_TAG):
        assert sweep() == "stopped"


@pytest.mark.parametrize("text", ["What is {{answer}}?", "{% if %}", "{# no comment", "plain"])
def test_texts_of_the_evaluation_are_no_templates(text: str) -> None:
    config = {"evaluators": [{"params": {"prompt": text}}]}
    deployment = DeploymentResponse(id=uuid4(), name="evaluate", flow_id=uuid4(), parameters={"config": config})
    (action,) = evaluate_automation(deployment).actions
    assert isinstance(action, RunDeployment)
    assert action.parameters is not None
    sent = action.parameters["config"]["evaluators"][0]["params"]["prompt"]
    assert render_user_template_sync(sent, {}) == text


SERVE_EVALUATE = """
import json, sys
from flows.evaluate import evaluate
evaluate.serve(name="evaluate", parameters={"config": json.loads(sys.argv[1])}, print_starting_message=False)
"""


@pytest.mark.slow
def test_each_checkpoint_of_a_tagged_run_is_evaluated(
    tmp_path: Path, prefect_server: str, engine_url: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    run_fields = fields(tmp_path, "watched", engine_url) | {"num_steps": 4, "checkpoint_every": 2}
    measured = {"run_name": "evaluate-{start}", "checkpoint": "base", "model": "tiny", "data": run_fields["data"]}
    measured["base_url"] = engine_url
    with serving(prefect_server, SERVE_EVALUATE, measured):
        with get_client(sync_client=True) as client:
            wait_for(lambda: [d for d in client.read_deployments() if d.name == "evaluate"], "a deployment", 90)
        install_all()
        assert "tinker-flows: evaluate: Runs the deployment evaluate/evaluate" in capsys.readouterr().out
        config = SftConfig.model_validate(run_fields)
        with tags(EVALUATE_TAG):
            sft(config)
        sft(config.model_copy(update={"run_name": "unwatched"}))
        for step in (2, 4):
            wait_for(lambda name=f"watched-at-{step}": completed(name), f"the evaluation at step {step}", 120)
        time.sleep(2.0)
        assert flow_run("unwatched-at-4") is None
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    runs = {run.info.run_name: run.data for run in client.search_runs(["1"], "")}
    assert runs.keys() == {"watched", "unwatched", "watched-at-2", "watched-at-4"}
    for step in (2, 4):
        record = next(record for record in checkpoints(tmp_path, "watched") if record["step"] == step)
        assert runs[f"watched-at-{step}"].tags["tinker.checkpoint"] in record.values()
        (nll,) = client.get_metric_history(
            next(run.info.run_id for run in client.search_runs(["1"], f"run_name = 'watched-at-{step}'")), "test/nll"
        )
        assert nll.step == step
