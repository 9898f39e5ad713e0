"""Internals of Prefect that the project uses. Only this module uses them."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import State
from prefect.events.worker import EventsWorker

# Attributes of an events worker that `send_events` reads.
WORKER_ATTRIBUTES = ("_loop", "_task", "_queue")


def state_error(state: State[Any]) -> object:
    """Return the exception of a state if it failed, and its result otherwise, also on a running event loop."""
    # Without the flag, the result is a coroutine if a loop is running.
    return state.result(raise_on_failure=False, _sync=True)  # pyright: ignore[reportCallIssue]


def send_events(limit_s: float) -> int:
    """Send Prefect's queued events and log lines; cancel what is left after `limit_s` and return how many.

    At exit, Prefect would wait without a limit, even for a server that accepts a request and never answers.
    """
    workers: list[tuple[EventsWorker, asyncio.AbstractEventLoop | None, asyncio.Task[Any] | None]] = [
        (worker, worker._loop, worker._task) for worker in tuple(EventsWorker._instances.values())
    ]
    EventsWorker.drain_all(timeout=limit_s)
    num_dropped = 0
    for worker, loop, task in workers:
        if loop and task and not task.done():
            num_dropped += max(worker._queue.qsize() - 1, 1)  # the queue ends with a stop marker
            loop.call_soon_threadsafe(task.cancel)
    return num_dropped
