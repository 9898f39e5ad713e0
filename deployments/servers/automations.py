"""Prefect automations: restart crashed runs, stop runs on warnings, evaluate checkpoints, and send notifications.

Tags of a run select the automations. A worker, or `flow.serve`, notices when its own runs die. For a run started from
a terminal, the server notices the missing heartbeats. A restarted run resumes from its last checkpoint.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, get_args
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events import EventTrigger
from prefect.events.actions import (
    ActionTypes,
    CallWebhook,
    CancelFlowRun,
    ChangeFlowRunState,
    PauseDeployment,
    RunDeployment,
)
from prefect.events.schemas.automations import AutomationCore, Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from blocks.errors import ConfigError
from blocks.prefect_errors import prefect_failures
from blocks.terminal import escape_terminal
from flows.monitoring.events import HEARTBEAT_EVERY_S, HEARTBEAT_TAG, PREFIX, Kind
from flows.monitoring.interrupts import RESTARTED

RESTART_TAG = "tinker-flows:restart"
STOP_TAG = "tinker-flows:stop-on-warning"
NOTIFY_TAG = "tinker-flows:notify"
PAUSE_TAG = "tinker-flows:pause-when-spent"
EVALUATE_TAG = "tinker-flows:evaluate"
WEBHOOK_BLOCK = "tinker-flows"
EVALUATE_DEPLOYMENT = "evaluate/evaluate"

HEARTBEAT = "prefect.flow-run.heartbeat"
CHECKPOINT = f"{PREFIX}.checkpoint"
WARNINGS = {f"{PREFIX}.{kind}" for kind in get_args(Kind)} - {CHECKPOINT}
CRASHED = "prefect.flow-run.Crashed"
# Names of the states into which a person, or another automation, may put a crashed run.
_STATES_AFTER_A_CRASH = ("Scheduled", "AwaitingRetry", "Pending", "Running", "Failed", "Cancelled", "Completed")
STATES_WITHOUT_HEARTBEATS = {
    f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Crashed", "Cancelled", "Paused", "Suspended")
}


def crash_automation(within_s: float = 3 * HEARTBEAT_EVERY_S) -> AutomationCore:
    """Build the automation that marks a run as Crashed when its heartbeats stop although it has not ended or paused.

    Args:
        within_s: seconds without a heartbeat after which a run counts as crashed.
    """
    return AutomationCore(
        name="tinker-flows: crashed",
        description=f"Marks a run tagged {HEARTBEAT_TAG} as Crashed after {within_s:.0f} s without a heartbeat.",
        trigger=EventTrigger(
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related=_tagged(HEARTBEAT_TAG),
            after={HEARTBEAT},
            expect={HEARTBEAT, *STATES_WITHOUT_HEARTBEATS},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=within_s),
        ),
        actions=_set_state(
            StateType.CRASHED,
            "Crashed",
            f"No heartbeat for {within_s:.0f} s: the process was killed or its machine went down.",
        ),
    )


def restart_automation(after_s: float = 60.0) -> AutomationCore:
    """Build the automation that reschedules a crashed run if its deployment has `RESTART_TAG`.

    A worker reports a crash twice. The server rejects the second report, which came up to 22 s later on a busy machine,
    only as long as the run is Crashed; it would otherwise crash the restarted run.

    Args:
        after_s: seconds for which the run has to stay Crashed.
    """
    return AutomationCore(
        name="tinker-flows: restart",
        description=f"Restarts a run of a deployment tagged {RESTART_TAG} that has been Crashed for {after_s:.0f} s; "
        "it resumes from its checkpoint.",
        trigger=EventTrigger(
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related=_tagged(RESTART_TAG),
            after={CRASHED},
            expect={f"prefect.flow-run.{name}" for name in _STATES_AFTER_A_CRASH},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=after_s),
        ),
        actions=_set_state(StateType.SCHEDULED, "AwaitingRetry", RESTARTED),
    )


def crash_loop_automation(num_crashes: int = 10, within: timedelta = timedelta(hours=1)) -> AutomationCore:
    """Build the automation that fails a run that `restart_automation` restarts again and again.

    The run itself counts only the restarts that reach its code (`max_restarts`), and not those in which its process
    ends during the imports.
    """
    return AutomationCore(
        name="tinker-flows: stop after many crashes",
        description=f"Fails a run of a deployment tagged {RESTART_TAG} that crashes {num_crashes} times within "
        f"{within.total_seconds() / 60:.0f} minutes.",
        trigger=EventTrigger(
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related=_tagged(RESTART_TAG),
            expect={CRASHED},
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=num_crashes,
            within=within,
        ),
        actions=_set_state(
            StateType.FAILED,
            "Failed",
            f"It crashed {num_crashes} times within {within.total_seconds() / 60:.0f} minutes and is not restarted "
            "again: find the cause in its log or the worker's, then choose Retry.",
        ),
    )


def stop_automation() -> AutomationCore:
    """Build the automation that cancels a run or sweep with `STOP_TAG` at a warning or a bad step."""
    return AutomationCore(
        name="tinker-flows: stop on a warning",
        description=f"Saves and cancels a run or sweep tagged {STOP_TAG} when it warns, or a guard skips or "
        "rolls back a step. A spent budget does not count.",
        trigger=_at_each(f"{PREFIX}.run.*", STOP_TAG, WARNINGS - {f"{PREFIX}.budget"}),
        actions=[CancelFlowRun()],
    )


def pause_automation() -> AutomationCore:
    """Build the automation that pauses a deployment with `PAUSE_TAG` when a run of it has spent its budget."""
    return AutomationCore(
        name="tinker-flows: pause when spent",
        description=f"Pauses the schedules of a deployment tagged {PAUSE_TAG} when a run of it spends its budget.",
        trigger=_at_each(f"{PREFIX}.run.*", PAUSE_TAG, {f"{PREFIX}.budget"}),
        actions=[PauseDeployment(source="inferred", deployment_id=None)],
    )


def _escape_templates(value: Any) -> Any:
    """Return a value in which template marks are escaped, so that Prefect does not render them."""
    if isinstance(value, dict):
        return {key: _escape_templates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape_templates(item) for item in value]
    is_template = isinstance(value, str) and any(mark in value for mark in ("{{", "{%", "{#"))
    return f"{{% raw %}}{value}{{% endraw %}}" if is_template else value


def evaluate_automation(deployment: DeploymentResponse) -> AutomationCore:
    """Build the automation that evaluates each checkpoint of a run with `EVALUATE_TAG`.

    Args:
        deployment: deployment of `evaluate`, whose parameter `config` says what is measured.
    """
    names = ("checkpoint", "base_url", "storage", "tracking", "experiment")
    of_the_run = {name: f"{{{{ event.payload.{name} }}}}" for name in names}
    run_name = "{{ event.payload.run_name }}-at-{{ event.payload.step }}"
    config = {
        **_escape_templates(deployment.parameters["config"]),
        "model": "",  # empty: `evaluate` takes the model from the run that saved the checkpoint
        "run_name": run_name,
        **of_the_run,
    }
    parameters = {"config": config}
    run = RunDeployment(source="selected", deployment_id=deployment.id, parameters=parameters, job_variables=None)
    return AutomationCore(
        name="tinker-flows: evaluate",
        description=f"Runs the deployment {EVALUATE_DEPLOYMENT} for each checkpoint of a run tagged {EVALUATE_TAG}.",
        trigger=_at_each(f"{PREFIX}.run.*", EVALUATE_TAG, {CHECKPOINT}),
        actions=[run],
    )


def notify_automation(webhook: UUID) -> AutomationCore:
    """Build the automation that calls a webhook when a run with `NOTIFY_TAG` needs attention.

    Args:
        webhook: id of the Webhook block.
    """
    return AutomationCore(
        name="tinker-flows: notify",
        description=f"Calls a webhook when a run tagged {NOTIFY_TAG} fails, crashes, warns, spends its budget or waits "
        "for approval.",
        trigger=_at_each(
            ["prefect.flow-run.*", f"{PREFIX}.run.*"],
            NOTIFY_TAG,
            {*(f"prefect.flow-run.{name}" for name in ("Failed", "Crashed", "Suspended")), *WARNINGS},
        ),
        actions=[CallWebhook(block_document_id=webhook, payload=_WEBHOOK_PAYLOAD)],
    )


_WEBHOOK_PAYLOAD = """{
  "event": {{ event.event | tojson }},
  "occurred": {{ event.occurred | string | tojson }},
  "run": {{ event.resource.name | tojson }},
  "message": {{ (event.payload.message or event.resource["prefect.state-message"]) | tojson }},
  "payload": {{ event.payload | tojson }}
}"""


def install_all() -> None:
    """Create the automations on the Prefect server of PREFECT_API_URL and print them.

    The one that evaluates checkpoints is left out if the server has no deployment `evaluate` with a `config`, and the
    one that notifies if it has no Webhook block; a printed line says so.

    Raises:
        ConfigError: PREFECT_API_URL is not set.
        ServiceError: the server does not respond or rejects a request.
    """
    if not PREFECT_API_URL.value():
        raise ConfigError("PREFECT_API_URL is not set: set it to a permanent Prefect server, which runs automations.")
    with prefect_failures("set PREFECT_API_URL to a running server"):
        webhook, deployment = _webhook_id(), _evaluate_deployment()
        automations = [crash_automation(), restart_automation(), crash_loop_automation()]
        automations += [stop_automation(), pause_automation()]
        automations += [evaluate_automation(deployment)] if deployment else []
        automations += [notify_automation(webhook)] if webhook else []
        for automation in automations:
            install(automation)
            print(escape_terminal(f"{automation.name}: {automation.description}"))
    if not deployment:
        print(
            f"No evaluation of checkpoints: create the deployment {EVALUATE_DEPLOYMENT} with a parameter `config` and "
            "run this command again."
        )
    if not webhook:
        print(f"No notifications: save a Webhook block named {WEBHOOK_BLOCK!r} in the UI and run this command again.")


def install(automation: AutomationCore) -> None:
    """Create an automation on the Prefect server, replacing any automation with the same name."""
    with get_client(sync_client=True) as client:
        # Delete and create: an update by this client drops the type of each action, which then does nothing.
        for existing in client.read_automations_by_name(automation.name):
            client.delete_automation(existing.id)
        client.create_automation(automation)


def _webhook_id() -> UUID | None:
    with get_client(sync_client=True) as client:
        try:
            return client.read_block_document_by_name(WEBHOOK_BLOCK, "webhook", include_secrets=False).id
        except ObjectNotFound:
            return None


def _evaluate_deployment() -> DeploymentResponse | None:
    with get_client(sync_client=True) as client:
        try:
            deployment = client.read_deployment_by_name(EVALUATE_DEPLOYMENT)
        except ObjectNotFound:
            return None
    return deployment if "config" in deployment.parameters else None


def _set_state(state: StateType, name: str, message: str) -> list[ActionTypes]:
    return [ChangeFlowRunState(state=state, name=name, message=message, force=False)]


def _tagged(tag: str) -> dict[str, str | list[str]]:
    return {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{tag}"}


def _at_each(resource: str | list[str], tag: str, events: set[str]) -> EventTrigger:
    """Build the trigger that fires at each of these events of a resource with a tag."""
    return EventTrigger(
        match={"prefect.resource.id": resource},
        match_related=_tagged(tag),
        expect=events,
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
    )
