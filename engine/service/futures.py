"""Results that clients come back for: one entry per request id, waited for by events, never polled."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import EngineError, NotThereError

log = logging.getLogger(__name__)

PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of a finished request, as it goes over the wire."""

    body: bytes
    media_type: str = PROTOBUF
    failed: bool = False

    @staticmethod
    def json(content: dict[str, Any]) -> Answer:
        return Answer(json.dumps(content).encode(), "application/json")

    @staticmethod
    def failure(message: str, category: str) -> Answer:
        return replace(Answer.json({"error": message, "category": category}), failed=True)


class Futures:
    """The open and the finished requests.

    A result that was fetched once is kept for a client that lost the response, the newest
    ``keep_bytes`` of them; one that was never fetched stays until its session ends.
    """

    def __init__(self, keep_bytes: int = 256 * 2**20) -> None:
        self._answers: dict[str, asyncio.Future[Answer]] = {}
        self._remembered: dict[str, Answer] = {}
        self._fetched: OrderedDict[str, int] = OrderedDict()
        self._fetched_bytes = 0
        self._keep_bytes = keep_bytes
        self._closing: asyncio.Future[Answer] | None = None

    def open(self, request_id: str) -> None:
        self._answers[request_id] = asyncio.get_running_loop().create_future()

    def remember(self, request_id: str, answer: Answer) -> None:
        """An answer that an earlier run of the engine gave."""
        self._remembered[request_id] = answer

    def finish(self, request_id: str, answer: Answer) -> None:
        """Wake whoever waits; a request whose session ended meanwhile is no longer here."""
        if (future := self._answers.get(request_id)) is not None:
            future.set_result(answer)

    async def settle(self, request_id: str, work: Awaitable[Answer]) -> Answer:
        """Finish ``request_id`` with what ``work`` gives, or with its error; it raises neither."""
        answer = await outcome(request_id, work)
        self.finish(request_id, answer)
        return answer

    async def fetch(self, request_id: str, timeout_s: float) -> Answer | None:
        """The result of ``request_id``; None where it is not there in time.

        Raises:
            NotThereError: the request is unknown, or its result was fetched long ago.
        """
        if (remembered := self._remembered.get(request_id)) is not None:
            return remembered
        future = self._answers.get(request_id)
        if future is None:
            raise NotThereError(
                f"The engine has no request {request_id}: its session ended or the engine was restarted "
                "since; create a new client from the last checkpoint."
            )
        if not future.done():
            if self._closing is None:
                self._closing = asyncio.get_running_loop().create_future()
            await asyncio.wait({future, self._closing}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                return None
        answer = future.result()
        self._note_fetched(request_id, len(answer.body))
        return answer

    def release(self) -> None:
        """Send all waiting clients away, so that the server can stop."""
        if self._closing is not None and not self._closing.done():
            self._closing.set_result(Answer(b""))

    def forget(self, prefix: str) -> None:
        """Drop all requests whose id starts with ``prefix``."""
        for request_id in [key for key in self._answers if key.startswith(prefix)]:
            del self._answers[request_id]
            self._fetched_bytes -= self._fetched.pop(request_id, 0)
        for request_id in [key for key in self._remembered if key.startswith(prefix)]:
            del self._remembered[request_id]

    def _note_fetched(self, request_id: str, num_bytes: int) -> None:
        self._fetched_bytes += num_bytes - self._fetched.pop(request_id, 0)
        self._fetched[request_id] = num_bytes
        while self._fetched_bytes > self._keep_bytes and len(self._fetched) > 1:
            oldest, size = self._fetched.popitem(last=False)
            self._fetched_bytes -= size
            self._answers.pop(oldest, None)


async def outcome(request_id: str, work: Awaitable[Answer]) -> Answer:
    """What ``work`` gives, or its error as an answer."""
    try:
        return await work
    except EngineError as error:
        return Answer.failure(str(error), error.category)
    except Exception as error:
        log.exception("Request %s failed", request_id)
        return Answer.failure(f"The engine failed on this request: {type(error).__name__}: {error}", "server")
