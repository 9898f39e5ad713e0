"""Wait until Prefect's background threads have delivered the task runs, events and logs of a run."""

from __future__ import annotations

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

from blocks.terminal import print_notice
from tasks.common.internals.prefect import send_events


def wait_until_recorded(flow_run_id: UUID, last_task: str | None, limit_s: float = 60.0) -> None:
    """Wait until the server has recorded the end of every task run of a flow run; report missing ones on stderr.

    Args:
        last_task: Name of the task that ends every completed run, for which the function waits; None for a run that did
            not complete.
    """
    flow_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    running = [state for state in StateType if state not in TERMINAL_STATES]
    open_runs = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=running)))
    last_runs = TaskRunFilter(name=TaskRunFilterName(like_=last_task))
    deadline = time.monotonic() + limit_s
    # The server records tasks in the order of their events, so the end of the last task comes after all other ends.
    # Without a last task, one poll may miss a task whose events arrive in a later batch, so two polls must agree. They
    # are more than a second apart, because the server writes task runs in batches, once a second.
    num_polls, pause_s = (1, 0.1) if last_task else (2, 1.2)
    times_complete = 0
    with get_client(sync_client=True) as client:
        while True:
            has_last = not last_task or client.read_task_runs(
                flow_run_filter=flow_run, task_run_filter=last_runs, limit=1
            )
            task_runs = client.read_task_runs(flow_run_filter=flow_run, task_run_filter=open_runs)
            # A task whose dependency failed stays in the state NotReady.
            unfinished = [run for run in task_runs if run.state_name != "NotReady"]
            times_complete = times_complete + 1 if has_last and not unfinished else 0
            if times_complete == num_polls:
                return
            if time.monotonic() > deadline:
                missing = f"a task run named {last_task}" if last_task else "every task run"
                names = ", ".join(run.name for run in unfinished[:3]) or missing
                others = f" and {len(unfinished) - 3} more" if len(unfinished) > 3 else ""
                print_notice(f"The Prefect server has not recorded the end of {names}{others}.")
                return
            time.sleep(pause_s)


def deliver_events(limit_s: float = 20.0) -> None:
    """Send Prefect's pending events and log lines within a time limit, then drop the rest and report it on stderr.

    Prefect itself waits without a limit at exit, even for a server that accepts requests and never responds.
    """
    if num_dropped := send_events(limit_s):
        dropped = f"{num_dropped} events and log lines of this run"
        print_notice(f"The Prefect server did not accept {dropped}: its UI lacks them.")
