"""The requests of one model, strictly in the order of their seq ids."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from engine.service.futures import Answer, Futures

Work = Callable[[], Awaitable[Answer]]


class OrderedQueue:
    """Starts request ``n`` when request ``n - 1`` is finished, whatever order they arrive in.

    A client numbers its requests and sends the chunks of one batch in parallel, so a gap is held open until
    it is filled. A request that arrives twice (its response was lost) is the same request: it gets the same
    id and runs once. A finished request is remembered by 16 bytes, its result by `Futures`.
    """

    def __init__(self, owner: str, futures: Futures) -> None:
        self._owner = owner
        self._futures = futures
        self._digests: dict[int, bytes] = {}
        self._waiting: dict[int, Work] = {}
        self._next = 0
        self._runner: asyncio.Task[None] | None = None

    def submit(self, seq_id: int, digest: bytes, work: Work) -> str:
        """Queue ``work`` as request ``seq_id``; returns the request id to come back with.

        Args:
            digest: of the decoded content, to tell a repeat from another request under the same number.
        """
        request_id = f"{self._owner}:{seq_id}"
        known = self._digests.get(seq_id)
        if known == digest:
            return request_id
        if known is not None:
            return self._conflict(f"{request_id}:{digest.hex()}", seq_id)
        self._digests[seq_id] = digest
        self._futures.open(request_id)
        self._waiting[seq_id] = work
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        return request_id

    def close(self) -> None:
        """Drop what has not started."""
        self._waiting.clear()

    async def _run(self) -> None:
        while (work := self._waiting.pop(self._next, None)) is not None:
            await self._futures.settle(f"{self._owner}:{self._next}", work())
            self._next += 1
        self._runner = None

    def _conflict(self, request_id: str, seq_id: int) -> str:
        self._futures.open(request_id)
        message = (
            f"Request {seq_id} of {self._owner} was already sent with other content: "
            "two clients share one model id; give each its own training client."
        )
        self._futures.finish(request_id, Answer.failure(message, "user"))
        return request_id
