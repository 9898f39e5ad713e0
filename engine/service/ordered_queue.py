"""Request queue of one model, which runs requests strictly in order of seq id."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from engine.errors import BusyError
from engine.service.futures import Futures, WireResponse, response_of
from engine.service.history import ModelHistory, ModelJournal
from engine.service.metrics import Metrics

Work = Callable[[], Awaitable[WireResponse]]
Status = Literal["unknown", "waiting", "running", "finished", "failed"]


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """One request to a model.

    Attributes:
        seq_id: sequence number; the request runs after all requests with smaller numbers.
        kind: name of the request's route, for the metrics.
        digest: digest of the decoded content, which distinguishes a resent request from a different request with the
            same seq id.
        changes: True if the request changes the weights, the moments or the gradient.
    """

    seq_id: int
    kind: str
    digest: bytes
    changes: bool
    work: Work = field(repr=False)


class Clock:
    """Clock that ticks every ``cycle_s`` seconds, as on the hosted service; 0 disables waiting."""

    def __init__(self, cycle_s: float) -> None:
        self._cycle_s = cycle_s

    async def tick(self) -> None:
        """Wait for the next tick."""
        if self._cycle_s > 0:
            await asyncio.sleep(self._cycle_s - time.monotonic() % self._cycle_s)


@dataclass(frozen=True, slots=True)
class QueueServices:
    """Services shared by all queues. `max_waiting` bounds the waiting requests of each queue, except the next one."""

    futures: Futures
    clock: Clock
    metrics: Metrics
    max_waiting: int


class OrderedQueue:
    """Queue that runs request ``n`` after request ``n - 1``, whatever their order of arrival.

    A client numbers its requests and sends the chunks of a batch in parallel, so the queue waits until a gap in the
    numbers is filled. A request that is resent because its response was lost keeps its request id and runs once: the
    queue keeps a 16-byte digest of each accepted request, and `Futures` the results, fetched ones up to a limit. The
    journal records the digest before the request runs, and a result in JSON before the client can see it; it does not
    record results of passes.
    """

    def __init__(self, owner: str, services: QueueServices, journal: ModelJournal) -> None:
        self._owner = owner
        self._services = services
        self._journal = journal
        self._digests: dict[int, bytes] = {}
        self._failed: set[int] = set()
        self._waiting: dict[int, QueuedRequest] = {}
        self._next = 0
        self._running: int | None = None
        self._runner: asyncio.Task[None] | None = None

    def restore(self, history: ModelHistory, applied: WireResponse, lost: WireResponse) -> None:
        """Restore the queue of an engine process that was killed.

        Args:
            applied: result for requests that the restored weights include, but whose own result was not recorded.
            lost: result for later requests without a recorded result.
        """
        self._digests = dict(history.digests)
        while self._next in self._digests:
            self._next += 1
        for seq_id in self._digests:
            default = applied if seq_id <= history.origin_seq_id else lost
            response = history.responses.get(seq_id, default)
            self._services.futures.restore(f"{self._owner}:{seq_id}", response)
            if response.failed:
                self._failed.add(seq_id)

    def submit(self, request: QueuedRequest) -> str:
        """Queue a request; return its request id.

        A request whose seq id belongs to a different request does not run: it gets an id of its own, and an error as
        its result.

        Raises:
            BusyError: the queue is full; the request can be sent again unchanged.
        """
        seq_id, digest = request.seq_id, request.digest
        request_id = f"{self._owner}:{seq_id}"
        known = self._digests.get(seq_id)
        if known == digest:
            return request_id
        if known is not None:
            return self._reject_conflict(f"{request_id}:{digest.hex()}", seq_id)
        # Always accept the next request to run, because all other requests wait for it.
        if len(self._waiting) >= self._services.max_waiting and seq_id != self._next:
            raise BusyError(
                f"{len(self._waiting)} requests of {self._owner} are waiting: send this request again later."
            )
        self._journal.record_request(seq_id, digest, request.changes)
        self._digests[seq_id] = digest
        self._services.futures.open(request_id)
        self._waiting[seq_id] = request
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        return request_id

    @property
    def running(self) -> int | None:
        """Seq id of the running request, or None."""
        return self._running

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def stats(self) -> dict[str, int | None]:
        """Return the number of waiting and accepted requests, and the seq ids of the running and the next request."""
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
        if seq_id in self._waiting:
            return "waiting"
        return "failed" if seq_id in self._failed else "finished"

    def close(self) -> None:
        """Drop the waiting requests."""
        self._waiting.clear()

    async def _run(self) -> None:
        while self._advance() in self._waiting:
            await self._services.clock.tick()
            for request in self._consecutive_requests():
                # The session may have ended and emptied the queue in the meantime.
                if self._waiting.pop(request.seq_id, None) is not None:
                    await self._execute(request)
        self._runner = None

    def _advance(self) -> int:
        """Move to the next seq id without a result from `restore` or from this process, and return it."""
        while self._next in self._digests and self._next not in self._waiting:
            self._next += 1
        return self._next

    def _consecutive_requests(self) -> list[QueuedRequest]:
        """List the waiting requests with consecutive seq ids that can run now, in order."""
        ready = []
        while (request := self._waiting.get(self._next + len(ready))) is not None:
            ready.append(request)
        return ready

    async def _execute(self, request: QueuedRequest) -> None:
        request_id = f"{self._owner}:{request.seq_id}"
        self._running = request.seq_id
        with self._services.metrics.timing(request.kind) as timing:
            response = await response_of(request_id, request.work())
            timing.failed = response.failed
        self._running = None
        if response.failed:
            self._failed.add(request.seq_id)
        self._next = request.seq_id + 1
        self._journal.record_response(request.seq_id, response)
        self._services.futures.finish(request_id, response)

    def _reject_conflict(self, request_id: str, seq_id: int) -> str:
        self._services.futures.open(request_id)
        message = (
            f"Request {seq_id} of {self._owner} was already sent with other content: "
            "two clients share one model id; give each its own training client."
        )
        self._services.futures.finish(request_id, WireResponse.failure(message, "user"))
        return request_id
