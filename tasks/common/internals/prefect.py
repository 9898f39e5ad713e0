"""Internals of Prefect that the project uses. Only this module uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

from httpx import HTTPStatusError
from prefect import State
from prefect._flow_run_suspension import FlowRunSuspensionRequest
from prefect.context import FlowRunContext, SettingsContext
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker, set_api_log_sink
from pydantic import PrivateAttr

# Attributes of an events worker that `send_events` reads.
WORKER_ATTRIBUTES = ("_loop", "_task", "_queue")

_LOG_PAUSES_S = (0.5, 2.0, 5.0, 0.0)  # after each attempt to send log lines


def state_error(state: State[Any]) -> object:
    """Return the exception of a state if it failed, and its result otherwise, also on a running event loop."""
    # Without the flag, the result is a coroutine if a loop is running.
    return state.result(raise_on_failure=False, _sync=True)  # pyright: ignore[reportCallIssue]


# Context of a flow run whose tasks see no request to suspend it, and the request.
_DEFERRED: ContextVar[tuple[FlowRunContext, FlowRunSuspensionRequest] | None] = ContextVar("deferred", default=None)


@contextmanager
def deferred_suspension() -> Iterator[FlowRunSuspensionRequest]:
    """Yield the request to suspend the current flow run; it stops no task that starts in this block.

    A context that is copied before this block still has the request, so enter it before the threads of a run start. In
    a block within another one of the same flow run, the request is that of the outer one.
    """
    context, deferred = FlowRunContext.get(), _DEFERRED.get()
    if context is None:
        yield FlowRunSuspensionRequest()
    elif deferred and deferred[0] is context:
        yield deferred[1]
    else:
        request = context.flow_run_suspension_request
        with context.model_copy(update={"flow_run_suspension_request": FlowRunSuspensionRequest()}) as own:
            token = _DEFERRED.set((own, request))
            try:
                yield request
            finally:
                _DEFERRED.reset(token)


class _SerializedSettings(SettingsContext):
    _serialized: dict[bool, dict[str, Any]] = PrivateAttr(default_factory=dict)

    def serialize(self: Self, include_secrets: bool = True) -> dict[str, Any]:
        if include_secrets not in self._serialized:
            self._serialized[include_secrets] = super().serialize(include_secrets)
        return self._serialized[include_secrets]


@contextmanager
def settings_serialized_once() -> Iterator[None]:
    """Serialize Prefect's settings once in this block, not for each task that is submitted to a worker.

    Serializing takes 12 ms, most of the time of a submission. Settings that are changed inside the block have a context
    of their own, so a worker receives the changed ones.
    """
    settings = SettingsContext.get()
    assert settings is not None, "Prefect's global settings are the default"
    with _SerializedSettings(profile=settings.profile, settings=settings.settings):
        yield


class _LogWorker(APILogWorker):
    """Worker that sends log lines again if the server fails; Prefect's own drops them and prints the error."""

    num_unsent = 0  # lines that are lost or being sent

    async def _handle_batch(self, items: list[dict[str, Any]]) -> None:
        self.num_unsent += len(items)
        for pause_s in _LOG_PAUSES_S:
            try:
                await self._client.create_logs(items)
            except Exception as error:  # noqa: BLE001 - Prefect's own worker ignores any error, too
                if isinstance(error, HTTPStatusError) and error.response.is_client_error:
                    return
                await asyncio.sleep(pause_s)
            else:
                self.num_unsent -= len(items)
                return


def resend_log_lines() -> None:
    """Send log lines of this process again if the server fails; `send_events` counts those that it never accepted."""
    set_api_log_sink(lambda line: _LogWorker.instance().send(line))


def send_events(limit_s: float) -> int:
    """Send Prefect's queued events and log lines; after `limit_s`, drop the rest.

    At exit, Prefect would wait without a limit, even for a server that accepts a request and never answers.

    Returns:
        Number of events and log lines that the server did not accept.
    """
    workers: list[tuple[EventsWorker, asyncio.AbstractEventLoop | None, asyncio.Task[Any] | None]] = [
        (worker, worker._loop, worker._task) for worker in tuple(EventsWorker._instances.values())
    ]
    EventsWorker.drain_all(timeout=limit_s)
    num_dropped = 0
    for worker, loop, task in workers:
        num_unsent = worker.num_unsent if isinstance(worker, _LogWorker) else 0
        num_dropped += num_unsent
        if loop and task and not task.done():
            num_dropped += max(worker._queue.qsize() - 1, 0 if num_unsent else 1)  # the queue ends with a stop marker
            loop.call_soon_threadsafe(task.cancel)
    return num_dropped
