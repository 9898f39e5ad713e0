"""Work pool of the deployments on the local Prefect server, managed over Prefect's REST API.

Plain HTTP requests avoid importing Prefect, which takes seconds.
"""

from __future__ import annotations

import time
from base64 import b64encode
from datetime import datetime
from typing import Any

import httpx

from blocks.errors import ServiceError, reason
from blocks.terminal import print_notice
from deployments.servers.health import STARTUP_LIMIT_S

POOL = "tinker-flows"
UNFINISHED_STATES = ("RUNNING", "PENDING", "CANCELLING")
# A server that has just started works through its backlog and responds with 503 meanwhile.
BUSY_LIMIT_S = 20.0


# Without variables, so that a form or a request cannot set the command or the environment of a run.
_JOB_TEMPLATE: dict[str, Any] = {
    "job_configuration": {"env": {}, "stream_output": True},
    "variables": {"type": "object", "properties": {}},
}


def prefect_api(url: str, login: str) -> httpx.Client:
    """Return a client for Prefect's REST API.

    Args:
        url: URL of the API.
        login: `USER:PASSWORD`, as in PREFECT_API_AUTH_STRING; empty for a server without a login.
    """
    headers = {"Authorization": f"Basic {b64encode(login.encode()).decode()}"} if login else {}
    return httpx.Client(base_url=url, headers=headers, timeout=30)


def open_pool(api: httpx.Client) -> None:
    """Create the work pool, or unpause the existing one; its runs have no job variables.

    Raises:
        ServiceError: the server rejected the request or did not respond.
    """
    _request(api, "work_pools/", {"name": POOL, "type": "process"}, accepted=(httpx.codes.CONFLICT,))
    _update_pool(api, {"is_paused": False, "base_job_template": _JOB_TEMPLATE})


def wait_for_pool(api: httpx.Client) -> None:
    """Wait until the server responds and has the work pool.

    Raises:
        ServiceError: the work pool did not exist within `STARTUP_LIMIT_S`.
    """
    deadline = time.monotonic() + STARTUP_LIMIT_S
    while not _has_pool(api):
        if time.monotonic() > deadline:
            raise ServiceError(
                f"The Prefect server at {api.base_url} had no work pool {POOL!r} within {STARTUP_LIMIT_S:.0f} s: start "
                f"the server and run `prefect work-pool create {POOL} --type process`."
            )
        time.sleep(0.2)


def pause_pool(api: httpx.Client) -> None:
    """Pause the work pool until the next `open_pool`, so that a run rescheduled during shutdown does not start."""
    try:
        _update_pool(api, {"is_paused": True})
    except ServiceError:
        return  # the server is down and cannot start runs


def end_orphaned_runs(api: httpx.Client) -> None:
    """End the unfinished runs of the previous worker, because they occupy concurrency slots.

    Runs in the state Cancelling become Cancelled, the only state that the server then accepts; all others become
    Crashed. Automations restart crashed runs whose deployment has the restart tag.

    Raises:
        ServiceError: the server rejected the request or did not respond.
    """
    orphans = {
        "flow_runs": {"state": {"type": {"any_": list(UNFINISHED_STATES)}}},
        "work_pools": {"name": {"any_": [POOL]}},
    }
    for run in _request(api, "flow_runs/filter", orphans):
        name = "Cancelled" if run["state_type"] == "CANCELLING" else "Crashed"
        state = {"type": name.upper(), "name": name, "message": "The worker ended and took the run with it."}
        answer = _request(api, f"flow_runs/{run['id']}/set_state", {"state": state, "force": False})
        if answer["status"] != "ACCEPT":
            print_notice(
                f"The flow run {run['name']!r} of an earlier worker is not set to {name} "
                f"({answer['details'].get('reason')}): set its state in the Prefect UI if it has not ended."
            )


def is_worker_online(api: httpx.Client, worker: str, since: float) -> bool:
    """Return whether the worker sent a heartbeat after the time `since`; an earlier worker may have had its name."""
    try:
        workers = _request(api, f"work_pools/{POOL}/workers/filter", {})
    except ServiceError:
        return False
    heartbeats = [record["last_heartbeat_time"] for record in workers if record["name"] == worker]
    return any(datetime.fromisoformat(heartbeat).timestamp() > since for heartbeat in heartbeats)


def _has_pool(api: httpx.Client) -> bool:
    try:
        return api.get(f"work_pools/{POOL}", timeout=5).is_success
    except httpx.HTTPError:
        return False


def _update_pool(api: httpx.Client, fields: dict[str, Any]) -> None:
    _request(api, f"work_pools/{POOL}", fields, method="PATCH")


def _request(
    api: httpx.Client, path: str, body: dict[str, Any], accepted: tuple[int, ...] = (), method: str = "POST"
) -> Any:
    """Send a request and return the decoded response, or None if it is empty; retry while the server is busy.

    Args:
        accepted: error statuses that count as success.
    """
    deadline = time.monotonic() + BUSY_LIMIT_S
    try:
        response = api.request(method, path, json=body)
        while response.status_code == httpx.codes.SERVICE_UNAVAILABLE and time.monotonic() < deadline:
            time.sleep(0.5)
            response = api.request(method, path, json=body)
        if response.status_code not in accepted:
            response.raise_for_status()
        return response.json() if response.content else None
    except (httpx.HTTPError, ValueError) as error:
        url = f"{api.base_url}{path}"
        raise ServiceError(f"The Prefect server failed on {method} {url} ({reason(error)}): see its log.") from error
