"""Event loop for terms that are async functions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from objectives.errors import ObjectiveError, exit_call

T = TypeVar("T")
P = ParamSpec("P")

# Time for the loop to cancel a coroutine; after that, the loop counts as blocked.
_CANCEL_S = 1.0


class TermLoop:
    """Event loop in a thread of its own, which starts on first use and ends on `close`; thread-safe.

    A loop that a coroutine blocks beyond its time limit is abandoned and replaced.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in the caller's thread; while it runs, the module's `wait_for` uses this loop."""
        token = _ACTIVE.set(self)
        try:
            return function(*args, **kwargs)
        finally:
            _ACTIVE.reset(token)

    def wait_for(self, awaitable: Awaitable[T], timeout_s: float | None) -> T:
        """Await an object on the loop, from any other thread.

        Raises:
            ObjectiveError: the awaitable called ``sys.exit``; or the time limit was exceeded, and the awaitable is
                cancelled, or abandoned if a coroutine blocks the loop.
        """
        loop = self._start()
        future = asyncio.run_coroutine_threadsafe(_within(awaitable, timeout_s), loop)
        try:
            return future.result(None if timeout_s is None else timeout_s + _CANCEL_S)
        except concurrent.futures.TimeoutError:
            if not future.done():  # the coroutine's own timeout did not fire, so an async function blocks the loop
                self._leave(loop)
                raise ObjectiveError(
                    f"it did not finish within its timeout_s of {timeout_s:g} s, because an async term blocks the "
                    "event loop; await slow operations, or use execution='thread' or 'process'"
                ) from None
            raise  # the awaitable itself raised a TimeoutError

    def close(self) -> None:
        """Cancel the coroutines on the loop and end its thread; a blocked thread ends when it is no longer blocked."""
        thread = self._thread
        if self._loop is not None:
            self._leave(self._loop)
        if thread is not None:
            thread.join(_CANCEL_S)

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name="async-terms", daemon=True)
                self._thread.start()
            return self._loop

    def _leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop a loop without waiting for it; the next `wait_for` starts a new one."""
        with self._lock:
            if self._loop is loop:
                self._loop = self._thread = None
                loop.call_soon_threadsafe(loop.stop)


# Loop of the runner that evaluates the current term.
_ACTIVE: ContextVar[TermLoop | None] = ContextVar("term_loop", default=None)


def wait_for(awaitable: Awaitable[T], timeout_s: float | None) -> T:
    """Await an object on the loop of the `TermRunner` that evaluates the term; outside one, on a loop for this call.

    Raises:
        ObjectiveError: see `TermLoop.wait_for`.
    """
    active = _ACTIVE.get()
    if active is not None:
        return active.wait_for(awaitable, timeout_s)
    with closing(TermLoop()) as loop:
        return loop.wait_for(awaitable, timeout_s)


def run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, even if a coroutine raises SystemExit or KeyboardInterrupt for its waiter."""
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            continue
        return


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then cancel its coroutines and close it."""
    with closing(loop):
        run_until_stopped(loop)
        loop.run_until_complete(_cancel_all())


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _within(awaitable: Awaitable[T], timeout_s: float | None) -> T:
    timeout = asyncio.timeout(timeout_s)
    try:
        async with timeout:
            return await awaitable
    except SystemExit as error:
        raise ObjectiveError(f"it called {exit_call(error)}") from error
    except TimeoutError:
        if not timeout.expired():  # raised by the awaitable itself
            raise
        raise ObjectiveError(f"it took longer than its timeout_s of {timeout_s:g} s and was cancelled") from None
