"""Task runs reach the Prefect server behind the run: let them arrive before the run's process or its server goes."""

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
from prefect.events.worker import EventsWorker


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
            found = [run for run in found if run.state_name != "NotReady"]  # what it needed failed: it stays so
            arrived = not last_task or client.read_task_runs(flow_run_filter=flow_run, task_run_filter=last, limit=1)
            times_complete = times_complete + 1 if arrived and not found else 0
            if time.monotonic() > deadline:
                names = ", ".join(run.name for run in found[:3]) or f"a task run named {last_task}"
                print(f"The Prefect server has no end for {names}.", file=sys.stderr)
                return
            time.sleep(1.2)  # the server writes task runs in batches, once a second


def deliver_events(limit_s: float = 20.0) -> None:
    """Send the events and log lines that Prefect has not sent yet, for so long; then drop them and say so.

    At exit Prefect itself waits without an end, also for a server that took a request and never answers it.
    """
    senders = [(each, each._loop, each._task) for each in tuple(EventsWorker._instances.values())]
    EventsWorker.drain_all(timeout=limit_s)
    num_dropped = 0
    for sender, loop, sending in senders:
        if loop and sending and not sending.done():
            num_dropped += max(sender._queue.qsize() - 1, 1)  # less the mark of its end
            loop.call_soon_threadsafe(sending.cancel)
    if num_dropped:
        what = f"{num_dropped} events and log lines of this run"
        print(f"The Prefect server did not take {what}: its UI lacks them.", file=sys.stderr)
