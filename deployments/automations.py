"""Automations of a Prefect server: a run that was killed is seen, and started again, stopped or told of by its tags.

A worker, or `flow.serve`, sees its own runs die; for a run started from a terminal, and for one whose worker died with
it, the server misses its heartbeats. A run that starts again goes on from its last checkpoint.
"""

from __future__ import annotations

from datetime import timedelta
from typing import get_args
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events import EventTrigger
from prefect.events.actions import ActionTypes, CallWebhook, CancelFlowRun, ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from blocks.errors import ConfigError
from flows.events import PREFIX, Kind
from flows.heartbeat import EVERY_S, TAG

RESTART_TAG = "tinker-flows:restart"
STOP_TAG = "tinker-flows:stop-on-warning"
NOTIFY_TAG = "tinker-flows:notify"
WEBHOOK_BLOCK = "tinker-flows"

HEARTBEAT = "prefect.flow-run.heartbeat"
EVENTS = {f"{PREFIX}.{kind}" for kind in get_args(Kind)}
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


def stopped() -> AutomationCore:
    """Cancels a run, or the sweep that it is a trial of, at a warning of its terms, where it has the tag."""
    return AutomationCore(
        name="tinker-flows: stop on a warning",
        description=f"What has the tag {STOP_TAG} is saved and cancelled when its terms warn.",
        trigger=EventTrigger(
            match={"prefect.resource.id": f"{PREFIX}.run.*"},
            match_related=_tagged(STOP_TAG),
            expect=EVENTS - {f"{PREFIX}.budget"},
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[CancelFlowRun()],
    )


def notified(webhook: UUID) -> AutomationCore:
    """Calls a webhook for what went wrong with a run that has the tag.

    Args:
        webhook: the id of the block with its address.
    """
    return AutomationCore(
        name="tinker-flows: notify",
        description=f"A webhook hears of runs tagged {NOTIFY_TAG}: failures, crashes, warnings, spent budgets.",
        trigger=EventTrigger(
            match={"prefect.resource.id": ["prefect.flow-run.*", f"{PREFIX}.run.*"]},
            match_related=_tagged(NOTIFY_TAG),
            expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed", *EVENTS},
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[CallWebhook(block_document_id=webhook, payload=_NOTICE)],
    )


_NOTICE = """{
  "event": {{ event.event | tojson }},
  "occurred": {{ event.occurred | string | tojson }},
  "run": {{ event.resource.name | tojson }},
  "message": {{ (event.payload.message or event.resource["prefect.state-message"]) | tojson }},
  "payload": {{ event.payload | tojson }}
}"""


def install_all() -> None:
    """Create all of them on the Prefect server in force, and say so.

    Raises:
        ConfigError: no server is named.
    """
    if not PREFECT_API_URL.value():
        raise ConfigError("PREFECT_API_URL is not set: automations live on a Prefect server that stays; name it.")
    webhook = _webhook()
    for automation in (crashed(), restarted(), stopped(), *([notified(webhook)] if webhook else [])):
        install(automation)
        print(f"{automation.name}: {automation.description}")
    if not webhook:
        print(f"No notifications: save a Webhook block named {WEBHOOK_BLOCK!r} in the UI and call this again.")


def install(automation: AutomationCore) -> None:
    """Create an automation on the Prefect server in force, in place of the one of that name."""
    with get_client(sync_client=True) as client:
        # Not updated: an update by this client leaves out the type of each action, which then does nothing.
        for found in client.read_automations_by_name(automation.name):
            client.delete_automation(found.id)
        client.create_automation(automation)


def _webhook() -> UUID | None:
    with get_client(sync_client=True) as client:
        try:
            return client.read_block_document_by_name(WEBHOOK_BLOCK, "webhook", include_secrets=False).id
        except ObjectNotFound:
            return None


def _set_state(state: StateType, name: str, message: str) -> list[ActionTypes]:
    return [ChangeFlowRunState(state=state, name=name, message=message, force=False)]


def _tagged(tag: str) -> dict[str, str | list[str]]:
    return {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{tag}"}
