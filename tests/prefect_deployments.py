"""The deployments of deployments/prefect.yaml on a server, a worker for them, and their runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectAlreadyExists

ROOT = Path(__file__).parents[1]
POOL = "tinker-flows"
OF_A_SERVICE = ("TINKER_API_KEY", "TINKER_BASE_URL")


def deploy_all(api: str) -> None:
    """Make the work pool and deploy, in a process of its own as a user does."""
    deploy(api, "--all")


def deploy(api: str, *which: str) -> None:
    """The same, for `--all` or one by `--name`."""
    with get_client(sync_client=True) as client, suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
    prefect(api, "--no-prompt", "deploy", *which, "--prefect-file", "deployments/prefect.yaml")


def prefect(api: str, *arguments: str) -> str:
    """Run a command of Prefect in the project's folder; what it prints."""
    command = [sys.executable, "-m", "prefect", *arguments]
    done = subprocess.run(command, env={**os.environ, "PREFECT_API_URL": api}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def process_worker(api: str, home: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker of the work pool, without a key or the address of a service; its runs keep their things in `home`."""
    env = {key: value for key, value in os.environ.items() if key not in OF_A_SERVICE}
    env |= {"PREFECT_API_URL": api, "TINKER_FLOWS_HOME": str(home), "PREFECT_WORKER_QUERY_SECONDS": "1"}
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL]
    with log.open("ab") as output:
        worker = subprocess.Popen(command, env=env, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield worker
    finally:
        worker.terminate()
        worker.wait(60)


def run_to_its_end(deployment_id: UUID, parameters: dict[str, Any] | None = None, limit_s: float = 400) -> FlowRun:
    """Start a run of a deployment as the UI does, and wait for its end."""
    with get_client(sync_client=True) as client:
        started = client.create_flow_run_from_deployment(deployment_id, parameters=parameters)
        return wait_for_end(started.id, limit_s)


def wait_for_end(flow_run_id: UUID, limit_s: float = 400) -> FlowRun:
    """The flow run once its state is final."""
    deadline = time.monotonic() + limit_s
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            run = client.read_flow_run(flow_run_id)
            if run.state and run.state.is_final():
                return run
            time.sleep(0.5)
    raise AssertionError(f"no end within {limit_s} s")
