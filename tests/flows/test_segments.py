"""What is tried again, and what is not, with an attempt that fails as told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from prefect import flow
from prefect.runtime import flow_run, task_run
from sft_config import sft_fields

from blocks.errors import AbsentError, ServiceLostError
from blocks.reach import check_answers
from flows.heartbeat import TAG, heartbeats
from flows.segments import in_segments
from flows.sft import SftConfig
from tasks.options import step_task

pytestmark = pytest.mark.usefixtures("prefect_server")

LOST = ServiceLostError("The Tinker service could not run forward_backward: the engine was restarted.")


def attempts_of(config: SftConfig, errors: list[Exception]) -> int:
    """How many attempts it takes to get over these errors, one each."""
    num_attempts = 0

    def attempt(restarts: Sequence[str]) -> int:
        nonlocal num_attempts
        num_attempts += 1
        assert len(restarts) == num_attempts - 1
        if errors:
            raise errors.pop(0)
        return num_attempts

    return flow(name="segments")(lambda: in_segments(config, attempt))()


def test_a_server_that_is_away_is_waited_for_once_it_was_there(tmp_path: Path, mlflow_uri: str) -> None:
    """The engine was lost, and on the way back to it either it or MLflow does not answer yet."""
    config = SftConfig.model_validate(sft_fields(tmp_path, "away", mlflow_uri))
    with pytest.raises(AbsentError, match="does not answer") as absent:
        check_answers("The MLflow server", "http://127.0.0.1:9/health", 1, "start it")
    assert attempts_of(config, [LOST, absent.value]) == 3
    with pytest.raises(AbsentError):
        attempts_of(config, [absent.value])


def test_the_tags_of_a_run_are_not_those_of_its_tasks(tmp_path: Path, mlflow_uri: str) -> None:
    """A tagged task waits for a slot from the server, and fails where the server is away."""
    config = SftConfig.model_validate(sft_fields(tmp_path, "tags", mlflow_uri))

    @step_task(name="tags")
    def tags_of_the_task() -> list[str]:
        return task_run.tags

    @flow(name="tagged")
    def tagged() -> tuple[list[str], list[str]]:
        return flow_run.tags, in_segments(config, lambda _: tags_of_the_task())

    with heartbeats():
        assert tagged() == ([TAG], [])
