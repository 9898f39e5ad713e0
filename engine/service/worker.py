"""Compute thread: the only thread that runs torch, shared fairly among the owners of work."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _WorkItem:
    function: Callable[[], object]
    result: asyncio.Future[Any]
    clients: int


@dataclass(slots=True)
class _Owner:
    """Owner of work: its waiting items, and the seconds charged to it."""

    name: str
    charged_s: float = 0.0
    waiting: deque[_WorkItem] = field(default_factory=deque)


class Worker:
    """Runs functions one at a time on its own thread, so that the event loop stays responsive.

    The next item belongs to the owner with the least charged time; with equally long items, owners take turns
    (start-time fair queueing: Goyal, Vin and Cheng 1996). An owner that was idle starts level with the active ones:
    it waits for the running item only, and has no time saved up.

    Attributes:
        busy_s: seconds spent on work so far.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start the thread.

        Args:
            clock: returns seconds, by which work is charged.
        """
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._owners: dict[str, _Owner] = {}
        self.busy_s = 0.0
        self._level_s = 0.0  # time charged to the owner of the latest item when the item started
        self._busy = False

    def call(self, function: Callable[[], Result]) -> Result:
        """Run ``function()`` on the thread, before the event loop starts; return its result or raise its exception."""
        return self._thread.submit(function).result()

    async def run(self, function: Callable[[], Result], owner: str = "", clients: int = 1) -> Result:
        """Run ``function()`` on the thread; return its result or raise its exception.

        Args:
            owner: owner of the work; an owner's items run in order.
            clients: number of clients that the item serves; the owner is charged the time divided by this number.
        """
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        entry = self._owners.setdefault(owner, _Owner(owner))
        if not entry.waiting:
            entry.charged_s = max(entry.charged_s, self._level_s)
        entry.waiting.append(_WorkItem(function, result, clients))
        self._start()
        return await result

    async def run_generator(
        self, generator: Generator[None, None, Result], owner: str, check: Callable[[float], None]
    ) -> Result:
        """Run a generator on the thread; return its return value. Other owners get their turn at each yield.

        Args:
            check: called at each yield with the seconds computed so far; an exception that it raises ends the work.
        """
        seconds = 0.0

        def advance() -> tuple[Result] | None:
            nonlocal seconds
            started = self._clock()
            try:
                return _advance(generator)
            finally:
                seconds += self._clock() - started

        while not (returned := await self.run(advance, owner)):
            check(seconds)
        return returned[0]

    def stop(self) -> None:
        """Finish the running item and drop the waiting ones."""
        self._thread.shutdown(cancel_futures=True)

    def _start(self) -> None:
        """Start the next item of the owner with the least charged time, unless an item is running."""
        ready = [owner for owner in self._owners.values() if owner.waiting]
        if self._busy or not ready:
            return
        owner = min(ready, key=lambda owner: owner.charged_s)
        self._level_s = owner.charged_s
        # Move the owner behind all owners at its level. Drop idle owners that are not ahead of it.
        self._owners = {o.name: o for o in self._owners.values() if o.waiting or o.charged_s > self._level_s}
        self._owners[owner.name] = self._owners.pop(owner.name)
        item = owner.waiting.popleft()
        self._busy = True
        started = self._clock()
        loop = asyncio.get_running_loop()

        def report(future: Future[Any]) -> None:
            if not loop.is_closed():  # the engine may have stopped
                loop.call_soon_threadsafe(self._finish, owner, item, future, self._clock() - started)

        self._thread.submit(item.function).add_done_callback(report)

    def _finish(self, owner: _Owner, item: _WorkItem, future: Future[Any], duration_s: float) -> None:
        self.busy_s += duration_s
        owner.charged_s += duration_s / item.clients
        if not item.result.cancelled():
            if error := future.exception():
                item.result.set_exception(error)
            else:
                item.result.set_result(future.result())
        # Let the coroutine that awaits the result submit its next item before the next owner is chosen.
        asyncio.get_running_loop().call_soon(self._start_next)

    def _start_next(self) -> None:
        self._busy = False
        self._start()


def _advance(generator: Generator[None, None, Result]) -> tuple[Result] | None:
    """Run a generator to its next yield; return its return value in a tuple if it ends."""
    try:
        next(generator)
    except StopIteration as stop:
        return (stop.value,)
    return None
