"""What a run tells the automations of its Prefect server beside its states; docs/events.md has the schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

Kind = Literal["dominance", "conflict", "explosion", "chance", "length", "budget"]
PREFIX = "tinker-flows"


def emit(kind: Kind, run_name: str, payload: Mapping[str, object]) -> None:
    """Emit `tinker-flows.<kind>` of a run; a server that is away is missed, and stops nobody.

    Prefect adds the flow run and its deployment; the flow run that the run belongs to, as that of the sweep for a
    trial, comes first, because an automation acts on the first.
    """
    try:
        emit_event(
            f"{PREFIX}.{kind}",
            resource={"prefect.resource.id": f"{PREFIX}.run.{run_name}", "prefect.resource.name": run_name},
            related=_belongs_to(),
            payload={"run_name": run_name, **payload},
        )
    except (httpx.HTTPError, PrefectException, RuntimeError, ValueError) as error:
        get_run_logger().warning("The event %s.%s of %s was not sent: %s", PREFIX, kind, run_name, error)


def _belongs_to() -> list[dict[str, str]]:
    """The flow run that nobody else started, and its tags, which those that it starts need not have."""
    root = flow_run.root_flow_run_id
    if not root:
        return []
    with get_client(sync_client=True) as client:
        tags = client.read_flow_run(UUID(root)).tags
    found = [(f"prefect.flow-run.{root}", "flow-run"), *((f"prefect.tag.{tag}", "tag") for tag in tags)]
    return [{"prefect.resource.id": resource, "prefect.resource.role": role} for resource, role in found]
