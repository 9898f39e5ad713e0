"""Retries of sync and async tasks: errors that the user has to fix are not retried."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prefect import Task, flow

from blocks.errors import ConfigError
from tasks.common.task import call, inline_tasks, retried_task

calls: list[str] = []


@retried_task(name="sync", retry_delay_seconds=0)
def sync_task(kind: Callable[[str], Exception]) -> None:
    calls.append("called")
    raise kind("no")


@retried_task(name="async", retry_delay_seconds=0)
async def async_task(kind: Callable[[str], Exception]) -> None:
    calls.append("called")
    raise kind("no")


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("task", [sync_task, async_task], ids=["sync", "async"])
@pytest.mark.parametrize(("kind", "num_calls"), [(ConfigError, 1), (RuntimeError, 3)], ids=["to fix", "transient"])
def test_only_transient_errors_are_retried(
    task: Task[..., None], kind: Callable[[str], Exception], num_calls: int
) -> None:
    calls.clear()

    @flow
    def run() -> None:
        task.submit(kind).result()

    with pytest.raises((ConfigError, RuntimeError), match="no"):
        run()
    assert len(calls) == num_calls


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(("kind", "num_calls"), [(ConfigError, 1), (RuntimeError, 4)], ids=["to fix", "transient"])
def test_inline_task_has_a_task_run_only_for_an_error_that_may_be_retried(
    kind: Callable[[str], Exception], num_calls: int
) -> None:
    calls.clear()

    @flow
    def run() -> None:
        with inline_tasks():
            call(sync_task, kind)

    with pytest.raises((ConfigError, RuntimeError), match="no"):
        run()
    assert len(calls) == num_calls
