"""The one thread that runs torch, and whose turn it is."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from engine.compute.parts import Parts, Result


@dataclass(frozen=True, slots=True)
class _Piece:
    function: Callable[[], Any]
    result: asyncio.Future[Any]
    clients: int


@dataclass(slots=True)
class _Owner:
    """Whoever has work: what waits, and the seconds spent on it."""

    name: str
    spent_s: float = 0.0
    waiting: deque[_Piece] = field(default_factory=deque)


class Worker:
    """Runs functions on a thread of its own, one piece at a time, so that the event loop always answers.

    The next piece is of the owner on whom the least of the thread's time was spent; with pieces of like size that is
    one after the other in turn (start-time fair queueing: Goyal, Vin and Cheng 1996). Whoever was idle starts level
    with those at work: it waits for the piece that is running, not for a queue, and has no time saved up.

    Attributes:
        busy_s: the seconds that its pieces took so far.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Args:
        clock: seconds, by which pieces are charged.
        """
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._owners: dict[str, _Owner] = {}
        self.busy_s = 0.0
        self._level_s = 0.0  # the time spent on the owner of the latest piece, when that started
        self._busy = False

    async def run(self, function: Callable[[], Result], owner: str = "", clients: int = 1) -> Result:
        """Await ``function()``; its exceptions come out here.

        Args:
            owner: who is served; its pieces run in the order they were given.
            clients: how many the piece serves: the owner is charged for one of them.
        """
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        entry = self._owners.setdefault(owner, _Owner(owner))
        if not entry.waiting:
            entry.spent_s = max(entry.spent_s, self._level_s)
        entry.waiting.append(_Piece(function, result, clients))
        self._start()
        return await result

    async def run_parts(self, parts: Parts[Result], owner: str) -> Result:
        """Await what ``parts`` returns; at each of its yields it is for others to have their turn."""
        while not (part := await self.run(lambda: _advance(parts), owner)):
            pass
        return part[0]

    def stop(self) -> None:
        """Finish what runs, drop what waits."""
        self._thread.shutdown(cancel_futures=True)

    def _start(self) -> None:
        ready = [owner for owner in self._owners.values() if owner.waiting]
        if self._busy or not ready:
            return
        owner = min(ready, key=lambda owner: owner.spent_s)
        self._level_s = owner.spent_s
        # Behind all that are level with it; whoever is idle and has nothing to be remembered for is forgotten.
        self._owners = {o.name: o for o in self._owners.values() if o.waiting or o.spent_s > self._level_s}
        self._owners[owner.name] = self._owners.pop(owner.name)
        piece = owner.waiting.popleft()
        self._busy = True
        started = self._clock()
        loop = asyncio.get_running_loop()

        def report(done: Future[Any]) -> None:
            if not loop.is_closed():  # the engine stopped meanwhile
                loop.call_soon_threadsafe(self._finish, owner, piece, done, self._clock() - started)

        self._thread.submit(piece.function).add_done_callback(report)

    def _finish(self, owner: _Owner, piece: _Piece, done: Future[Any], took_s: float) -> None:
        self.busy_s += took_s
        owner.spent_s += took_s / piece.clients
        if not piece.result.cancelled():
            if error := done.exception():
                piece.result.set_exception(error)
            else:
                piece.result.set_result(done.result())
        # Whoever awaits the result first gives its next piece, if it has one, and then the choice is made.
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._busy = False
        self._start()


def _advance(parts: Parts[Result]) -> tuple[Result] | None:
    try:
        next(parts)
    except StopIteration as stop:
        return (stop.value,)
    return None
