"""Results of requests by request id. A result wakes the fetches that wait for it; clients long-poll."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace

from engine.errors import EngineError, NotFoundError

log = logging.getLogger(__name__)

PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True, slots=True)
class WireResponse:
    """Response to a finished request, as sent to the client."""

    body: bytes
    media_type: str = PROTOBUF
    failed: bool = False

    @staticmethod
    def json(content: Mapping[str, object]) -> WireResponse:
        return WireResponse(json.dumps(content, allow_nan=False).encode(), "application/json")

    @staticmethod
    def failure(message: str, category: str) -> WireResponse:
        return replace(WireResponse.json({"error": message, "category": category}), failed=True)


class Futures:
    """Pending and finished requests.

    In case the client lost the response, fetched results are kept: those that were fetched last, up to ``keep_bytes``,
    but at least one. A result that was never fetched, or that is from an earlier process, is kept until its session
    ends.
    """

    def __init__(self, keep_bytes: int = 256 * 2**20) -> None:
        self._responses: dict[str, asyncio.Future[WireResponse]] = {}
        self._restored: dict[str, WireResponse] = {}
        self._fetched: OrderedDict[str, int] = OrderedDict()
        self._fetched_bytes = 0
        self._keep_bytes = keep_bytes
        self._stop_signal: asyncio.Future[WireResponse] | None = None  # ends the wait of fetches; has no result
        self._is_closing = False

    def open(self, request_id: str) -> None:
        self._responses[request_id] = asyncio.get_running_loop().create_future()

    def restore(self, request_id: str, response: WireResponse) -> None:
        """Add a response from an earlier engine process."""
        self._restored[request_id] = response

    def finish(self, request_id: str, response: WireResponse) -> None:
        """Deliver a response to its waiting clients; ignored if the request's session has ended."""
        if (future := self._responses.get(request_id)) is not None:
            future.set_result(response)

    async def run(self, request_id: str, work: Awaitable[WireResponse]) -> WireResponse:
        """Finish ``request_id`` with the result or the error of ``work``; raises only if it is cancelled."""
        response = await response_of(request_id, work)
        self.finish(request_id, response)
        return response

    async def fetch(self, request_id: str, timeout_s: float) -> WireResponse | None:
        """Return the result of ``request_id``; None if it is pending after ``timeout_s`` or when the server stops.

        Raises:
            NotFoundError: the request is unknown, or its result was fetched and has been dropped since.
        """
        if (restored := self._restored.get(request_id)) is not None:
            return restored
        future = self._responses.get(request_id)
        if future is None:
            raise NotFoundError(
                f"The engine has no request {request_id}: its session ended, the engine was restarted, or "
                "its result was fetched before and has been dropped; create a new client from the last checkpoint."
            )
        if not future.done():
            if self._is_closing:
                return None
            if self._stop_signal is None:
                self._stop_signal = asyncio.get_running_loop().create_future()
            await asyncio.wait({future, self._stop_signal}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                return None
        response = future.result()
        self._record_fetch(request_id, len(response.body))
        return response

    def release_waiters(self) -> None:
        """Make every fetch of a pending result return None at once, so that the server can stop."""
        self._is_closing = True
        if self._stop_signal is not None:
            self._stop_signal.cancel()

    def drop(self, prefix: str) -> None:
        """Drop all requests whose id starts with ``prefix``, such as ``<session id>:`` when a session ends."""
        for request_id in [key for key in self._responses if key.startswith(prefix)]:
            del self._responses[request_id]
            self._fetched_bytes -= self._fetched.pop(request_id, 0)
        for request_id in [key for key in self._restored if key.startswith(prefix)]:
            del self._restored[request_id]

    def _record_fetch(self, request_id: str, num_bytes: int) -> None:
        self._fetched_bytes += num_bytes - self._fetched.pop(request_id, 0)
        self._fetched[request_id] = num_bytes
        while self._fetched_bytes > self._keep_bytes and len(self._fetched) > 1:
            oldest, size = self._fetched.popitem(last=False)
            self._fetched_bytes -= size
            self._responses.pop(oldest, None)


async def response_of(request_id: str, work: Awaitable[WireResponse]) -> WireResponse:
    """Await ``work``; return its result, or its error as a response."""
    try:
        return await work
    except EngineError as error:
        return WireResponse.failure(str(error), error.category)
    except Exception as error:
        log.exception("Request %s failed", request_id)
        return WireResponse.failure(f"The engine failed on this request: {type(error).__name__}: {error}", "server")
