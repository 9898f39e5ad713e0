"""The requests of one model, strictly in the order of their seq ids."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from engine.errors import BusyError
from engine.service.clock import Clock
from engine.service.futures import Answer, Futures, outcome
from engine.service.history import ModelHistory, Notes
from engine.service.metrics import Metrics

Work = Callable[[], Awaitable[Answer]]
Status = Literal["unknown", "waiting", "running", "finished"]


@dataclass(frozen=True, slots=True)
class Request:
    """One request to a model.

    Attributes:
        seq_id: its number: it runs when all below have run.
        kind: its route, for the figures.
        digest: of the decoded content, to tell a repeat from another request under the same number.
        changes: whether it changes the weights, the moments or the gradient.
    """

    seq_id: int
    kind: str
    digest: bytes
    changes: bool
    work: Work = field(repr=False)


@dataclass(frozen=True, slots=True)
class QueueServices:
    """What all queues share."""

    futures: Futures
    clock: Clock
    metrics: Metrics
    max_waiting: int


class OrderedQueue:
    """Starts request ``n`` when request ``n - 1`` is finished, whatever order they arrive in.

    A client numbers its requests and sends the chunks of one batch in parallel, so a gap is held open until
    it is filled. A request that arrives twice (its response was lost) is the same request: it gets the same
    id and runs once. A finished request is remembered by 16 bytes, its result by `Futures`, and both by the
    journal before the client hears of them.
    """

    def __init__(self, owner: str, services: QueueServices, notes: Notes) -> None:
        self._owner = owner
        self._services = services
        self._notes = notes
        self._digests: dict[int, bytes] = {}
        self._waiting: dict[int, Request] = {}
        self._next = 0
        self._running: int | None = None
        self._runner: asyncio.Task[None] | None = None

    def restore(self, history: ModelHistory, held: Answer, lost: Answer) -> None:
        """Go on where an earlier run of the engine was killed.

        Args:
            held: the answer to requests whose effect the model still has, but whose result was not kept.
            lost: the answer to those that came later.
        """
        self._digests = dict(history.digests)
        while self._next in self._digests:
            self._next += 1
        for seq_id in self._digests:
            otherwise = held if seq_id <= history.origin_seq_id else lost
            self._services.futures.remember(f"{self._owner}:{seq_id}", history.answers.get(seq_id, otherwise))

    def submit(self, request: Request) -> str:
        """Queue a request; returns the request id to come back with.

        Raises:
            BusyError: too many wait; this one is as if it had never come.
        """
        seq_id, digest = request.seq_id, request.digest
        request_id = f"{self._owner}:{seq_id}"
        known = self._digests.get(seq_id)
        if known == digest:
            return request_id
        if known is not None:
            return self._conflict(f"{request_id}:{digest.hex()}", seq_id)
        # The one that all others wait for is never sent away.
        if len(self._waiting) >= self._services.max_waiting and seq_id != self._next:
            raise BusyError(f"{len(self._waiting)} requests of {self._owner} wait: ask again in a second.")
        self._notes.request(seq_id, digest, request.changes)
        self._digests[seq_id] = digest
        self._services.futures.open(request_id)
        self._waiting[seq_id] = request
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        return request_id

    @property
    def running(self) -> int | None:
        """The seq id of the request at work."""
        return self._running

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def stats(self) -> dict[str, int | None]:
        """How many requests wait, which one runs, which seq id is next, how many were accepted in all."""
        return {
            "waiting": len(self._waiting),
            "running": self._running,
            "next_seq_id": self._next,
            "accepted": len(self._digests),
        }

    def status(self, seq_id: int) -> Status:
        if seq_id not in self._digests:
            return "unknown"
        if seq_id == self._running:
            return "running"
        return "waiting" if seq_id in self._waiting else "finished"

    def close(self) -> None:
        """Drop what has not started."""
        self._waiting.clear()

    async def _run(self) -> None:
        while self._skip_finished() in self._waiting:
            await self._services.clock.tick()
            for request in self._ready():
                # A session that ended meanwhile has emptied the queue.
                if self._waiting.pop(request.seq_id, None) is not None:
                    await self._do(request)
        self._runner = None

    def _skip_finished(self) -> int:
        """The next seq id to run: those an earlier run of the engine has seen are passed over."""
        while self._next in self._digests and self._next not in self._waiting:
            self._next += 1
        return self._next

    def _ready(self) -> list[Request]:
        """What may run now, one after another."""
        ready = []
        while (request := self._waiting.get(self._next + len(ready))) is not None:
            ready.append(request)
        return ready

    async def _do(self, request: Request) -> None:
        request_id = f"{self._owner}:{request.seq_id}"
        self._running = request.seq_id
        with self._services.metrics.timing(request.kind) as timing:
            answer = await outcome(request_id, request.work())
            timing.failed = answer.failed
        self._running = None
        self._next = request.seq_id + 1
        self._notes.answer(request.seq_id, answer)
        self._services.futures.finish(request_id, answer)

    def _conflict(self, request_id: str, seq_id: int) -> str:
        self._services.futures.open(request_id)
        message = (
            f"Request {seq_id} of {self._owner} was already sent with other content: "
            "two clients share one model id; give each its own training client."
        )
        self._services.futures.finish(request_id, Answer.failure(message, "user"))
        return request_id
