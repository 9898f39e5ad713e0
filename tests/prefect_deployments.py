"""Helpers that deploy deployments/prefect.yaml to a server, run a worker and wait for flow runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID

from forked_program import start_program
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectAlreadyExists

ROOT = Path(__file__).parents[1]
POOL = "tinker-flows"
SERVICE_VARIABLES = ("TINKER_API_KEY", "TINKER_BASE_URL")


def deploy_all(api: str) -> None:
    """Create the work pool and deploy every flow in a separate process, as a user does."""
    deploy(api, "--all")


def deploy(api: str, *selection: str) -> None:
    """Create the work pool and deploy a selection: `--all`, or `--name` and a name."""
    with get_client(sync_client=True) as client, suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
    prefect(api, "--no-prompt", "deploy", *selection, "--prefect-file", "deployments/prefect.yaml")


def prefect(api: str, *arguments: str) -> None:
    """Run a Prefect command in the project folder."""
    with TemporaryDirectory() as folder:
        environment = {**os.environ, "PREFECT_API_URL": api}
        program = start_program(["-m", "prefect", *arguments], environment, Path(folder) / "prefect.log")
        assert program.wait(240) == 0, program.output()


@contextmanager
def process_worker(api: str, home: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker without Tinker variables; its runs use the project home `home`."""
    env = {key: value for key, value in os.environ.items() if key not in SERVICE_VARIABLES}
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
    """Start a run of a deployment as the UI does and wait until it ends."""
    with get_client(sync_client=True) as client:
        run = client.create_flow_run_from_deployment(deployment_id, parameters=parameters)
        return wait_for_end(run.id, limit_s)


def wait_for_end(flow_run_id: UUID, limit_s: float = 400) -> FlowRun:
    """Wait until a flow run has a final state and return it."""
    deadline = time.monotonic() + limit_s
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            run = client.read_flow_run(flow_run_id)
            if run.state and run.state.is_final():
                return run
            time.sleep(0.5)
    raise AssertionError(f"the flow run did not end within {limit_s} s")
