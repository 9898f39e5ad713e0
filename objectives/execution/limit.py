"""A limit on how long a function may take that cannot be stopped from outside."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from objectives.errors import ExecutionError

T = TypeVar("T")


class LimitedThreads:
    """Runs functions in threads of their own and gives up on those that take too long.

    A thread cannot be killed: one that is given up stays, and its caller is refused another until it has ended.
    """

    def __init__(self) -> None:
        self._given_up: dict[str, threading.Thread] = {}

    def run(self, caller: str, function: Callable[[], T], timeout_s: float) -> T:
        """What the function returns or raises.

        Raises:
            ExecutionError: it took longer, or the caller's last one that did is still at it.
        """
        stuck = self._given_up.pop(caller, None)
        if stuck is not None and stuck.is_alive():
            self._given_up[caller] = stuck
            raise ExecutionError(f"it is still busy with an earlier batch, and {too_long(timeout_s)}")
        outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def work() -> None:
            try:
                outcome.put((function(), None))
            except BaseException as error:  # noqa: BLE001  # raised again below, where it is waited for
                outcome.put((None, error))

        # A daemon: the process must be able to end without it.
        thread = threading.Thread(target=work, name=f"term-{caller}", daemon=True)
        thread.start()
        try:
            value, error = outcome.get(timeout=timeout_s)
        except queue.Empty:
            self._given_up[caller] = thread
            raise ExecutionError(too_long(timeout_s)) from None
        if error is not None:
            raise error
        return value  # type: ignore[return-value]


def too_long(timeout_s: float) -> str:
    """Why a term's thread was given up, and what can be stopped instead."""
    return (
        f"it took longer than its timeout_s of {timeout_s:g} s and goes on in its thread, which cannot be stopped; "
        "under execution='process' it is killed"
    )
