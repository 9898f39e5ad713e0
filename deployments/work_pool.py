"""Work pool of the deployments on the local Prefect server, managed over Prefect's REST API.

Plain HTTP requests avoid importing Prefect, which takes seconds.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import httpx

from blocks.errors import ServiceError, reason
from deployments.health import CLIENT, STARTUP_LIMIT_S, is_healthy

POOL = "tinker-flows"
UNFINISHED_STATES = ("RUNNING", "PENDING", "CANCELLING")
# A server that has just started works through its backlog and responds with 503 meanwhile.
BUSY_LIMIT_S = 20.0


# Without variables, so that a form or a request cannot set the command or the environment of a run.
_JOB_TEMPLATE: dict[str, Any] = {
    "job_configuration": {"env": {}, "stream_output": True},
    "variables": {"type": "object", "properties": {}},
}


def open_pool(prefect: str) -> None:
    """Create the work pool, or unpause the existing one; its runs have no job variables.

    Args:
        prefect: URL of the Prefect server.

    Raises:
        ServiceError: the server rejected the request or did not respond.
    """
    _request(prefect, "work_pools/", {"name": POOL, "type": "process"}, accepted=(httpx.codes.CONFLICT,))
    _update_pool(prefect, {"is_paused": False, "base_job_template": _JOB_TEMPLATE})


def wait_for_pool(prefect: str) -> None:
    """Wait until the server responds and has the work pool.

    Raises:
        ServiceError: the work pool did not exist within `STARTUP_LIMIT_S`.
    """
    deadline = time.monotonic() + STARTUP_LIMIT_S
    while not is_healthy(f"{prefect}/api/work_pools/{POOL}"):
        if time.monotonic() > deadline:
            raise ServiceError(
                f"The Prefect server at {prefect} had no work pool {POOL!r} within {STARTUP_LIMIT_S:.0f} s: start the "
                f"server and run `prefect work-pool create {POOL} --type process`."
            )
        time.sleep(0.2)


def pause_pool(prefect: str) -> None:
    """Pause the work pool until the next `open_pool`, so that a run rescheduled during shutdown does not start."""
    try:
        _update_pool(prefect, {"is_paused": True})
    except ServiceError:
        return  # the server is down and cannot start runs


def crash_orphaned_runs(prefect: str) -> None:
    """Mark unfinished runs of the previous worker as Crashed, because they occupy concurrency slots.

    The automations restart the runs whose deployment has the restart tag.

    Raises:
        ServiceError: the server rejected the request or did not respond.
    """
    orphans = {
        "flow_runs": {"state": {"type": {"any_": list(UNFINISHED_STATES)}}},
        "work_pools": {"name": {"any_": [POOL]}},
    }
    for run in _request(prefect, "flow_runs/filter", orphans):
        state = {"type": "CRASHED", "name": "Crashed", "message": "The worker ended and took the run with it."}
        _request(prefect, f"flow_runs/{run['id']}/set_state", {"state": state, "force": False})


def is_worker_online(prefect: str, worker: str, since: float) -> bool:
    """Return whether the worker sent a heartbeat after the time `since`; an earlier worker may have had its name."""
    try:
        workers = _request(prefect, f"work_pools/{POOL}/workers/filter", {})
    except ServiceError:
        return False
    heartbeats = [record["last_heartbeat_time"] for record in workers if record["name"] == worker]
    return any(datetime.fromisoformat(heartbeat).timestamp() > since for heartbeat in heartbeats)


def _update_pool(prefect: str, fields: dict[str, Any]) -> None:
    _request(prefect, f"work_pools/{POOL}", fields, method="PATCH")


def _request(
    prefect: str, path: str, body: dict[str, Any], accepted: tuple[int, ...] = (), method: str = "POST"
) -> Any:
    """Send a request and return the decoded response, or None if it is empty; retry while the server is busy.

    Args:
        accepted: error statuses that count as success.
    """
    url = f"{prefect}/api/{path}"
    deadline = time.monotonic() + BUSY_LIMIT_S
    try:
        response = CLIENT.request(method, url, json=body)
        while response.status_code == httpx.codes.SERVICE_UNAVAILABLE and time.monotonic() < deadline:
            time.sleep(0.5)
            response = CLIENT.request(method, url, json=body)
        if response.status_code not in accepted:
            response.raise_for_status()
        return response.json() if response.content else None
    except (httpx.HTTPError, ValueError) as error:
        raise ServiceError(f"The Prefect server failed on {method} {url} ({reason(error)}): see its log.") from error
