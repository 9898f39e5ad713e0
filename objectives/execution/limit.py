"""Time limits for functions that cannot be stopped."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import TypeVar

from objectives.errors import ExecutionError

T = TypeVar("T")


class LimitedThreads:
    """Runner of functions in separate threads, which abandons threads that exceed a time limit.

    A thread cannot be killed. An abandoned thread continues, and its caller cannot start another before it ends. Calls
    may be concurrent.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abandoned: dict[str, list[threading.Thread]] = {}

    def run(self, caller: str, function: Callable[[], T], timeout_s: float) -> T:
        """Call a function with the caller's context variables and return its result.

        Raises:
            ExecutionError: the time limit was exceeded, or the caller's abandoned thread is still running.
        """
        if self._is_stuck(caller):
            raise ExecutionError(f"it is still busy with an earlier batch, and {too_long(timeout_s)}")
        outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def work() -> None:
            try:
                outcome.put((function(), None))
            except BaseException as error:  # noqa: BLE001  # raised in the waiting thread below
                outcome.put((None, error))

        # A daemon thread does not keep the process alive.
        thread = threading.Thread(target=copy_context().run, args=[work], name=f"term-{caller}", daemon=True)
        thread.start()
        try:
            value, error = outcome.get(timeout=timeout_s)
        except queue.Empty:
            with self._lock:
                self._abandoned.setdefault(caller, []).append(thread)
            raise ExecutionError(too_long(timeout_s)) from None
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def _is_stuck(self, caller: str) -> bool:
        """Return whether an abandoned thread of a caller is still running."""
        with self._lock:
            running = [thread for thread in self._abandoned.pop(caller, []) if thread.is_alive()]
            if running:
                self._abandoned[caller] = running
            return bool(running)


def too_long(timeout_s: float) -> str:
    """Return the error clause for an abandoned thread."""
    return (
        f"it took longer than its timeout_s of {timeout_s:g} s and continues in its thread, which cannot be stopped; "
        "set execution='process' to kill it at the limit"
    )
