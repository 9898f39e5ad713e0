"""Restarts after errors, with an attempt that raises given errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from prefect import flow
from prefect.runtime import flow_run, task_run
from sft_config import sft_fields

from blocks.errors import ServiceLostError, UnreachableError
from blocks.urls import check_reachable
from flows.monitoring.events import HEARTBEAT_TAG, heartbeats
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
