"""Signals for automations of the Prefect server: events of a run (schema in docs/events.md) and its heartbeats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal
from uuid import UUID

import httpx
from prefect import tags
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

Kind = Literal[
    "dominance",
    "idle",
    "adverse",
    "conflict",
    "target",
    "explosion",
    "chance",
    "length",
    "budget",
    "health",
    "guard",
    "alert",
    "checkpoint",
]
PREFIX = "tinker-flows"
HEARTBEAT_EVERY_S = 30
# Tag of the flow runs that send heartbeats; the server must not expect heartbeats from other runs.
HEARTBEAT_TAG = "tinker-flows:heartbeat"


@contextmanager
def heartbeats() -> Iterator[None]:
    """Have flow runs that start in this block send heartbeats, so that the server notices a killed process."""
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: HEARTBEAT_EVERY_S}), tags(HEARTBEAT_TAG):
        yield


def emit(kind: Kind, run_name: str, payload: Mapping[str, object]) -> None:
    """Emit the event `tinker-flows.<kind>` of a run; log a warning if the server is unavailable.

    The root flow run, such as the sweep of a trial, comes first in the related resources, because an automation acts
    on the first one. Prefect itself adds the flow run and its deployment.
    """
    try:
        emit_event(
            f"{PREFIX}.{kind}",
            resource={"prefect.resource.id": f"{PREFIX}.run.{run_name}", "prefect.resource.name": run_name},
            related=_related_resources(),
            payload={"run_name": run_name, **payload},
        )
    except (httpx.HTTPError, PrefectException, RuntimeError, ValueError) as error:
        get_run_logger().warning("The event %s.%s of the run %s was not sent: %s", PREFIX, kind, run_name, error)


def _related_resources() -> list[dict[str, str]]:
    """Return the root flow run and its tags; child flow runs need not have these tags."""
    root = flow_run.root_flow_run_id
    if not root:
        return []
    resources = [(f"prefect.flow-run.{root}", "flow-run"), *((f"prefect.tag.{tag}", "tag") for tag in _tags(root))]
    return [{"prefect.resource.id": resource, "prefect.resource.role": role} for resource, role in resources]


@lru_cache(maxsize=64)
def _tags(flow_run_id: str) -> tuple[str, ...]:
    """Read the tags of a flow run once, because Prefect's client retries for a minute while the server is down."""
    with get_client(sync_client=True) as client:
        return tuple(client.read_flow_run(UUID(flow_run_id)).tags)
