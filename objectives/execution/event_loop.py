"""The one event loop on which terms that are async functions are awaited."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable
from typing import Any

from objectives.errors import ObjectiveError

# How long a loop may take to cancel what was awaited too long, before it counts as blocked.
_CANCEL_S = 1.0

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def wait_for(awaitable: Awaitable[Any], timeout_s: float | None) -> Any:
    """Await something on the event loop, from any thread but its own.

    Raises:
        ObjectiveError: it took longer than the limit; it is then cancelled.
    """
    loop = _running_loop()
    future = asyncio.run_coroutine_threadsafe(_within(awaitable, timeout_s), loop)
    try:
        return future.result(None if timeout_s is None else timeout_s + _CANCEL_S)
    except concurrent.futures.TimeoutError:
        # Its own limit was not heard either: some async function blocks the loop, which is left to it.
        if not future.done():
            _leave(loop)
            raise ObjectiveError(
                f"it was not done after its timeout_s of {timeout_s:g} s, since an async term blocks the event loop: "
                "await what takes long, or use execution='thread' or 'process'"
            ) from None
        raise


async def _within(awaitable: Awaitable[Any], timeout_s: float | None) -> Any:
    timeout = asyncio.timeout(timeout_s)
    try:
        async with timeout:
            return await awaitable
    except TimeoutError:
        if not timeout.expired():  # one of its own
            raise
        raise ObjectiveError(f"it took longer than its timeout_s of {timeout_s:g} s and was cancelled") from None


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="async-terms", daemon=True).start()
        return _loop


def _leave(loop: asyncio.AbstractEventLoop) -> None:
    global _loop
    with _lock:
        if _loop is loop:
            _loop = None
