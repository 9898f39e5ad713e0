"""What every task shares: errors that a user has to mend are not tried again, whatever the kind of task."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prefect import Task, flow

from blocks.errors import ConfigError
from tasks.options import retried_task

calls: list[str] = []


@retried_task(name="sync", retry_delay_seconds=0)
def in_a_thread(kind: Callable[[str], Exception]) -> None:
    calls.append("called")
    raise kind("no")


@retried_task(name="async", retry_delay_seconds=0)
async def on_a_loop(kind: Callable[[str], Exception]) -> None:
    calls.append("called")
    raise kind("no")


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("task", [in_a_thread, on_a_loop], ids=["sync", "async"])
@pytest.mark.parametrize(("kind", "num_calls"), [(ConfigError, 1), (RuntimeError, 3)], ids=["to mend", "may pass"])
def test_only_what_may_pass_is_tried_again(
    task: Task[..., None], kind: Callable[[str], Exception], num_calls: int
) -> None:
    calls.clear()

    @flow
    def run() -> None:
        task.submit(kind).result()

    with pytest.raises((ConfigError, RuntimeError), match="no"):
        run()
    assert len(calls) == num_calls
