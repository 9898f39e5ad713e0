"""Proxy between the flow and one service that forwards all traffic and fails requests on command."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from chaos.schedule import Fault

# Start of an HTTP/1 request. Clients here do not pipeline requests, and WebSocket frames never match.
_REQUEST = re.compile(rb"(GET|HEAD|POST|PUT|PATCH|DELETE) (\S+) HTTP/1\.[01]\r\n")
_PAGE = b"<html><body><h1>Welcome to the airport's wireless network</h1>"
_NOISE = bytes(range(256))


@dataclass(slots=True)
class Armed:
    """Fault waiting for a request.

    Attributes:
        skip: number of matching requests to pass through first.
        path: path of the matching requests; empty matches all.
        hit: the request that the fault hit; empty until then.
        hit_at: time of the hit on the monotonic clock.
    """

    fault: Fault
    skip: int
    path: str
    hit: str = ""
    hit_at: float = 0.0


class Proxy:
    """Proxy from one loopback port to another.

    Attributes:
        num_requests: number of forwarded requests by path.
        num_samples: number of forwarded sampling requests since the last snapshot of the weights.
    """

    def __init__(self, port: int, upstream: int) -> None:
        self.port, self.upstream = port, upstream
        self.num_requests: Counter[str] = Counter()
        self.num_samples = 0
        self._armed: list[Armed] = []

    async def listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    def arm(self, fault: Fault, path: str = "") -> Armed:
        """Inject a fault into the next request, or the next request to `path`, after the skipped requests."""
        armed = Armed(fault, fault.skip, path)
        self._armed.append(armed)
        return armed

    def disarm(self) -> None:
        """Remove the faults that have not hit a request."""
        self._armed.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            link = Link(reader, writer, *await asyncio.open_connection("127.0.0.1", self.upstream))
        except OSError:  # the service is down
            writer.transport.abort()
            return
        tasks = [asyncio.create_task(self._forward_requests(link)), asyncio.create_task(_forward_responses(link))]
        with suppress(asyncio.CancelledError):  # asyncio would log the cancellation when the proxies stop
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        link.close()

    async def _forward_requests(self, link: Link) -> None:
        while chunk := await link.client.read(2**16):
            if start := _REQUEST.match(chunk):
                fault = self._pop_fault(start)
                if fault and fault.action in ("drop request", "500", "429"):
                    await _reject(link, fault)
                    return
                link.fault = fault
                self._count(start[2].decode())
            link.to_server.write(chunk)
            await link.to_server.drain()

    def _count(self, path: str) -> None:
        self.num_requests[path] += 1
        if path == "/api/v1/create_sampling_session":
            self.num_samples = 0
        self.num_samples += path == "/api/v1/asample"

    def _pop_fault(self, start: re.Match[bytes]) -> Fault | None:
        path = start[2].decode()
        for armed in tuple(self._armed):
            if armed.path in ("", path) and armed.skip == 0:
                self._armed.remove(armed)
                armed.hit, armed.hit_at = f"{start[1].decode()} {path}", time.monotonic()
                return armed.fault
            armed.skip -= armed.path in ("", path)
        return None


@dataclass(slots=True)
class Link:
    """Connections of one client through the proxy, and the fault for the next response."""

    client: asyncio.StreamReader
    to_client: asyncio.StreamWriter
    server: asyncio.StreamReader
    to_server: asyncio.StreamWriter
    fault: Fault | None = None
    reset: bool = field(default=False)

    def close(self) -> None:
        self.to_server.transport.abort()
        if self.reset:
            self.to_client.transport.abort()
        else:
            self.to_client.close()


async def _reject(link: Link, fault: Fault) -> None:
    if fault.action == "drop request":
        link.reset = True
        return
    link.to_client.write(_page_response(fault.action))
    # Read the rest of the request: closing a connection with unread data resets it, and the client loses the response.
    with suppress(TimeoutError):
        async with asyncio.timeout(1):
            while await link.client.read(2**16):
                pass


async def _forward_responses(link: Link) -> None:
    while chunk := await link.server.read(2**16):
        fault, link.fault = link.fault, None
        if fault and fault.action == "delay response":
            await asyncio.sleep(fault.seconds)
        elif fault:
            link.reset = fault.action == "drop response"
            link.to_client.write(_faulty_response(fault, chunk))
            await link.to_client.drain()
            return
        link.to_client.write(chunk)
        await link.to_client.drain()


def _faulty_response(fault: Fault, chunk: bytes) -> bytes:
    """Return the bytes that replace a response starting with `chunk`."""
    return {
        "drop response": b"",
        "cut response": chunk[: len(chunk) // 2],
        "500 after": _page_response("500"),
        "garbage": _page_response("200"),
        "noise": _NOISE,
    }[fault.action]


def _page_response(status: str) -> bytes:
    head = f"HTTP/1.1 {status} Chaos\r\nContent-Type: text/html\r\nContent-Length: {len(_PAGE)}\r\n"
    return f"{head}Connection: close\r\nRetry-After: 1\r\n\r\n".encode() + _PAGE


class Proxies:
    """Proxies by name, served by one thread while the block runs."""

    def __init__(self, proxies: dict[str, Proxy]) -> None:
        self.by_name = proxies
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        for proxy in self.by_name.values():
            asyncio.run_coroutine_threadsafe(proxy.listen(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
