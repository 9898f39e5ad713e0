"""A run that is killed ends as Crashed, and where its deployment says so, is started again and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import yaml
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling
from sft_config import sft_fields

from deployments.automations import RESTART_TAG, crashed, install, restarted

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
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


def ended(run_name: str) -> FlowRun | None:
    run = flow_run(run_name)
    return run if run and run.state and run.state.is_completed() else None


def wait_for(found: Callable[[], T | None], limit_s: float) -> T:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if result := found():
            return result
        time.sleep(0.2)
    raise AssertionError(f"not within {limit_s} s")


def checkpoints(folder: Path, run_name: str) -> list[dict[str, Any]]:
    path = folder / "runs" / run_name / "checkpoints.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_a_killed_run_of_a_terminal_is_crashed_within_two_minutes(
    tmp_path: Path, prefect_server: str, engine_url: str
) -> None:
    install(crashed())
    install(crashed())  # a second time changes it
    with get_client(sync_client=True) as client:
        assert [each.name for each in client.read_automations_by_name("tinker-flows: crashed")]
    config = tmp_path / "sft.yaml"
    config.write_text(yaml.safe_dump(fields(tmp_path, "killed-in-a-terminal", engine_url)))
    command = [sys.executable, "-m", "flows.sft", "--config", str(config)]
    process = subprocess.Popen(command, env=environment(prefect_server), cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for(lambda: checkpoints(tmp_path, "killed-in-a-terminal"), 120)
    process.kill()
    process.wait()
    run = flow_run("killed-in-a-terminal")
    assert run is not None
    assert run.state is not None
    assert run.state.is_running()
    wait_for(lambda: (r := flow_run("killed-in-a-terminal")) and r.state and r.state.is_crashed(), 120)


@contextmanager
def served_run(api: str, config: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """A run of a served deployment that has saved something; the process that serves it."""
    serving = subprocess.Popen(
        [sys.executable, "-c", SERVE, json.dumps(config)],
        env=environment(api),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with get_client(sync_client=True) as client:
            deployment = wait_for(lambda: next(iter(client.read_deployments()), None), 90)
            name = config["run_name"]
            client.create_flow_run_from_deployment(deployment.id, parameters={"config": config}, name=name)
        wait_for(lambda: checkpoints(Path(config["storage"]).parent, name), 120)
        yield serving
    finally:
        serving.terminate()
        serving.wait()


@pytest.mark.slow
def test_a_crashed_run_of_a_deployment_is_started_again_and_goes_on(
    tmp_path: Path, prefect_server: str, engine_url: str
) -> None:
    install(restarted())
    run_name = "killed-on-a-worker"
    with served_run(prefect_server, fields(tmp_path, run_name, engine_url)) as serving:
        for child in psutil.Process(serving.pid).children(recursive=True):
            child.kill()
        run = wait_for(lambda: ended(run_name), 240)
    assert run.run_count == 2
    steps = [record["step"] for record in checkpoints(tmp_path, run_name)]
    assert steps == sorted(set(steps))
    assert checkpoints(tmp_path, run_name)[-1]["final"]


@pytest.mark.slow
def test_a_cancelled_run_of_a_deployment_saves_the_step_under_way(
    tmp_path: Path, prefect_server: str, engine_url: str
) -> None:
    run_name = "cancelled-on-a-worker"
    with served_run(prefect_server, fields(tmp_path, run_name, engine_url) | {"num_steps": 999}):
        run = flow_run(run_name)
        assert run is not None
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run.id, Cancelling())
        wait_for(lambda: (r := flow_run(run_name)) and r.state and r.state.is_cancelled(), 60)
    (killed,) = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").search_runs(["1"], "status = 'KILLED'")
    assert checkpoints(tmp_path, run_name)[-1]["step"] == killed.data.metrics["progress/batch"] + 1
