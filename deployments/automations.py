"""Automations of a Prefect server: a run that was killed is seen, and where its deployment says so, started again.

A worker, or `flow.serve`, sees its own runs die; for a run started from a terminal, and for one whose worker died with
it, the server misses its heartbeats. A run that starts again goes on from its last checkpoint.
"""

from __future__ import annotations

from datetime import timedelta

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events import EventTrigger
from prefect.events.actions import ActionTypes, ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, Posture
from prefect.settings import PREFECT_API_URL

from blocks.errors import ConfigError
from flows.heartbeat import EVERY_S, TAG

RESTART_TAG = "tinker-flows:restart"

HEARTBEAT = "prefect.flow-run.heartbeat"
ENDS = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Crashed", "Cancelled", "Paused", "Suspended")}


def crashed(within_s: float = 3 * EVERY_S) -> AutomationCore:
    """Marks a run Crashed that gave heartbeats and then neither one more nor an end.

    Args:
        within_s: how long nothing may come.
    """
    return AutomationCore(
        name="tinker-flows: crashed",
        description=f"A run tagged {TAG} that gives no sign of life for {within_s:.0f} s is Crashed.",
        trigger=EventTrigger(
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related=_tagged(TAG),
            after={HEARTBEAT},
            expect={HEARTBEAT, *ENDS},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=within_s),
        ),
        actions=_set_state(
            StateType.CRASHED,
            "Crashed",
            f"Its process gave no sign of life for {within_s:.0f} s: it was killed, or its machine was.",
        ),
    )


def restarted() -> AutomationCore:
    """Schedules a run again that crashed, where its deployment has the tag."""
    return AutomationCore(
        name="tinker-flows: restart",
        description=f"A crashed run of a deployment tagged {RESTART_TAG} is started again, and goes on.",
        trigger=EventTrigger(
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related=_tagged(RESTART_TAG),
            expect={"prefect.flow-run.Crashed"},
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=_set_state(StateType.SCHEDULED, "AwaitingRetry", "It crashed and is started again."),
    )


def install_all() -> None:
    """Create both on the Prefect server in force, and say so.

    Raises:
        ConfigError: no server is named.
    """
    if not PREFECT_API_URL.value():
        raise ConfigError("PREFECT_API_URL is not set: automations live on a Prefect server that stays; name it.")
    for automation in (crashed(), restarted()):
        install(automation)
        print(f"{automation.name}: {automation.description}")


def install(automation: AutomationCore) -> None:
    """Create an automation on the Prefect server in force, in place of the one of that name."""
    with get_client(sync_client=True) as client:
        found = client.read_automations_by_name(automation.name)
        if found:
            client.update_automation(found[0].id, automation)
        else:
            client.create_automation(automation)


def _set_state(state: StateType, name: str, message: str) -> list[ActionTypes]:
    return [ChangeFlowRunState(state=state, name=name, message=message, force=False)]


def _tagged(tag: str) -> dict[str, str | list[str]]:
    return {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{tag}"}
