"""The work pool that the deployments are for, on the Prefect server of this machine, by a few requests."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import httpx

from blocks.errors import ServiceError, reason
from deployments.ready import CLIENT, LIMIT_S, answers

POOL = "tinker-flows"
LEFT = ("RUNNING", "PENDING", "CANCELLING")
# A server that has just started is busy with what it left undone, and says so.
BUSY_S = 20.0


def make_pool(prefect: str) -> None:
    """Make the work pool, or open the one that is there; its worker says what a job of it looks like.

    Args:
        prefect: URL of the server.

    Raises:
        ServiceError: the server did not.
    """
    _ask(prefect, "work_pools/", {"name": POOL, "type": "process"}, good=(httpx.codes.CONFLICT,))
    _change_pool(prefect, {"is_paused": False})


def wait_for_pool(prefect: str) -> None:
    """Wait until the server answers and has the pool.

    Raises:
        ServiceError: that took longer than a service may take.
    """
    deadline = time.monotonic() + LIMIT_S
    while not answers(f"{prefect}/api/work_pools/{POOL}"):
        if time.monotonic() > deadline:
            raise ServiceError(
                f"The Prefect server at {prefect} had no work pool {POOL!r} within {LIMIT_S:.0f} s: start it, and make "
                f"the pool by `prefect work-pool create {POOL} --type process`."
            )
        time.sleep(0.2)


def close_pool(prefect: str) -> None:
    """Let nobody start a run of the pool until the next `make_pool`: what ends now may be scheduled again at once."""
    try:
        _change_pool(prefect, {"is_paused": True})
    except ServiceError:
        return  # the server is gone, and nobody is given a run


def give_up_left_runs(prefect: str) -> None:
    """Have the runs that ended with the last worker, and could not say so, be Crashed: they keep others from starting.

    The automations start those again whose deployment says so.

    Raises:
        ServiceError: the server did not.
    """
    mine = {"flow_runs": {"state": {"type": {"any_": list(LEFT)}}}, "work_pools": {"name": {"any_": [POOL]}}}
    for run in _ask(prefect, "flow_runs/filter", mine):
        state = {"type": "CRASHED", "name": "Crashed", "message": "Its worker ended, and the run with it."}
        _ask(prefect, f"flow_runs/{run['id']}/set_state", {"state": state, "force": False})


def is_polling(prefect: str, worker: str, since: float) -> bool:
    """Whether a worker has given a sign of life since a moment; yesterday's of the same name has left one too."""
    try:
        found = _ask(prefect, f"work_pools/{POOL}/workers/filter", {})
    except ServiceError:
        return False
    stamps = [each["last_heartbeat_time"] for each in found if each["name"] == worker]
    return any(datetime.fromisoformat(stamp).timestamp() > since for stamp in stamps)


def _change_pool(prefect: str, change: dict[str, Any]) -> None:
    _ask(prefect, f"work_pools/{POOL}", change, method="PATCH")


def _ask(prefect: str, path: str, body: dict[str, Any], good: tuple[int, ...] = (), method: str = "POST") -> Any:
    """What the server answers; None where that is nothing."""
    url = f"{prefect}/api/{path}"
    deadline = time.monotonic() + BUSY_S
    try:
        answer = CLIENT.request(method, url, json=body)
        while answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and time.monotonic() < deadline:
            time.sleep(0.5)
            answer = CLIENT.request(method, url, json=body)
        if answer.status_code not in good:
            answer.raise_for_status()
        return answer.json() if answer.content else None
    except (httpx.HTTPError, ValueError) as error:
        raise ServiceError(f"The Prefect server did not do {method} {url} ({reason(error)}): see its log.") from error
