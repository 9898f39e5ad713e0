"""Task runs reach the Prefect server behind the run: wait for them before a temporary server is stopped."""

from __future__ import annotations

import sys
import time
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterName,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, StateType


def wait_until_recorded(flow_run_id: UUID, last_task: str | None, limit_s: float = 60.0) -> None:
    """Wait until the server has an end for every task run of a flow run; say so where it has not.

    Args:
        last_task: the name of the task that a completed run ends with: nothing is complete before the server has it.
    """
    flow_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    running = [state for state in StateType if state not in TERMINAL_STATES]
    open_runs = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=running)))
    last = TaskRunFilter(name=TaskRunFilterName(like_=last_task))
    deadline = time.monotonic() + limit_s
    times_complete = 0
    with get_client(sync_client=True) as client:
        while times_complete < 2:  # once may fall between the start and the end of a late batch of events
            found = client.read_task_runs(flow_run_filter=flow_run, task_run_filter=open_runs)
            arrived = not last_task or client.read_task_runs(flow_run_filter=flow_run, task_run_filter=last, limit=1)
            times_complete = times_complete + 1 if arrived and not found else 0
            if time.monotonic() > deadline:
                print(f"The Prefect server has no end for {len(found)} or more task runs.", file=sys.stderr)
                return
            time.sleep(1.2)  # the server writes task runs in batches, once a second
