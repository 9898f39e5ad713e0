"""Restarts after errors, with an attempt that raises given errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run, task_run
from prefect.states import Cancelling, Crashed, Pending, Running, Scheduled
from sft_config import sft_fields

from blocks.errors import ServiceLostError, UnreachableError
from blocks.urls import check_reachable
from flows.monitoring.events import HEARTBEAT_TAG, heartbeats
from flows.monitoring.interrupts import RESTARTED
from flows.runs.retries import run_with_restarts
from flows.sft import SftConfig
from tasks.common.task import step_task

pytestmark = pytest.mark.usefixtures("prefect_server")

LOST = ServiceLostError("The Tinker service could not run forward_backward: the engine was restarted.")


def attempts_of(config: SftConfig, errors: list[Exception]) -> int:
    """Return the number of attempts if each of the first ones raises one of the errors."""
    num_attempts = 0

    def attempt(restarts: Sequence[str]) -> int:
        nonlocal num_attempts
        num_attempts += 1
        assert len(restarts) == num_attempts - 1
        if errors:
            raise errors.pop(0)
        return num_attempts

    return flow(name="segments")(lambda: run_with_restarts(config, attempt))()


def test_unreachable_server_is_awaited_only_after_a_first_contact(
    tmp_path: Path, mlflow_uri: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """After the engine was lost, the engine or MLflow may still be unreachable; the terminal shows each reason."""
    config = SftConfig.model_validate(sft_fields(tmp_path, "away", mlflow_uri))
    with pytest.raises(UnreachableError, match="does not respond") as unreachable:
        check_reachable("The MLflow server", "http://127.0.0.1:9/health", 1, "start it")
    assert attempts_of(config, [LOST, unreachable.value]) == 3
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("prefect.")]
    for reason in (LOST, unreachable.value):
        assert any(line.startswith(f"{reason} Resuming away from the last checkpoint in") for line in lines)
    with pytest.raises(UnreachableError):
        attempts_of(config, [unreachable.value])


def test_tasks_do_not_inherit_the_tags_of_the_run(tmp_path: Path, mlflow_uri: str) -> None:
    """A tagged task would ask the server for a slot, and fail if the server is unavailable."""
    config = SftConfig.model_validate(sft_fields(tmp_path, "tags", mlflow_uri))

    @step_task(name="tags")
    def tags_of_the_task() -> list[str]:
        return task_run.tags

    @flow(name="tagged")
    def tagged() -> tuple[list[str], list[str]]:
        return flow_run.tags, run_with_restarts(config, lambda _: tags_of_the_task())

    with heartbeats():
        assert tagged() == ([HEARTBEAT_TAG], [])


@pytest.mark.parametrize(
    ("message", "end"), [(RESTARTED, StateType.CANCELLED), ("Retry from the UI", StateType.COMPLETED)]
)
def test_a_cancelled_run_that_crashed_is_continued_only_by_a_person(
    tmp_path: Path, mlflow_uri: str, message: str, end: StateType
) -> None:
    config = SftConfig.model_validate(sft_fields(tmp_path, "cancelled", mlflow_uri))

    @flow(name="restarted")
    def restarted() -> int:
        return run_with_restarts(config, lambda _: 1)

    with get_client(sync_client=True) as client:
        run = client.create_flow_run(restarted)
        restart = Scheduled(name="AwaitingRetry", message=message)
        for state in (
            Running(),
            Cancelling(),
            Crashed(),
            restart,
            Scheduled(name="AwaitingConcurrencySlot"),
            Pending(),
        ):
            client.set_flow_run_state(run.id, state, force=True)
        run_flow(restarted, flow_run=client.read_flow_run(run.id), return_type="state")
        state = client.read_flow_run(run.id).state
    assert state
    assert state.type == end
