"""A proxy between the flow and one service, that passes everything on until it is told to fail a request."""

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

# The start of a request, as a client sends it that waits for each answer: a WebSocket's frames never look so.
_REQUEST = re.compile(rb"(GET|HEAD|POST|PUT|PATCH|DELETE) (\S+) HTTP/1\.[01]\r\n")
_PAGE = b"<html><body><h1>Welcome to the airport's wireless network</h1>"
_NOISE = bytes(range(256))


@dataclass(slots=True)
class Armed:
    """A fault on its way to a request.

    Attributes:
        skip: so many requests are let through before.
        path: of the requests in question; empty means all.
        hit: the request that it befell; empty until then.
        hit_at: when, by the monotonic clock.
    """

    fault: Fault
    skip: int
    path: str
    hit: str = ""
    hit_at: float = 0.0


class Proxy:
    """Listens on one port of the loopback and passes on to another.

    Attributes:
        num_requests: passed on so far, by path.
    """

    def __init__(self, port: int, upstream: int) -> None:
        self.port, self.upstream = port, upstream
        self.num_requests: Counter[str] = Counter()
        self._armed: list[Armed] = []

    async def listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    def arm(self, fault: Fault, path: str = "") -> Armed:
        """Let a fault befall the next request, or the next to a path, after those that it skips."""
        armed = Armed(fault, fault.skip, path)
        self._armed.append(armed)
        return armed

    def disarm(self) -> None:
        """Forget the faults that no request has met."""
        self._armed.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            link = Link(reader, writer, *await asyncio.open_connection("127.0.0.1", self.upstream))
        except OSError:  # the service is away
            writer.transport.abort()
            return
        ways = [asyncio.create_task(self._pass_requests(link)), asyncio.create_task(_pass_answers(link))]
        with suppress(asyncio.CancelledError):  # at the end of the proxies, which asyncio would log
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        link.close()

    async def _pass_requests(self, link: Link) -> None:
        while chunk := await link.client.read(2**16):
            if start := _REQUEST.match(chunk):
                fault = self._take(start)
                if fault and fault.action in ("drop request", "500", "429"):
                    await _refuse(link, fault)
                    return
                link.fault = fault
                self.num_requests[start[2].decode()] += 1
            link.to_server.write(chunk)
            await link.to_server.drain()

    def _take(self, start: re.Match[bytes]) -> Fault | None:
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
    """The two connections of one client, and the fault that the next answer meets."""

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


async def _refuse(link: Link, fault: Fault) -> None:
    if fault.action == "drop request":
        link.reset = True
        return
    link.to_client.write(_answer(fault.action))
    with suppress(TimeoutError):  # what is unread when a connection is closed resets it, and takes the answer with it
        async with asyncio.timeout(1):
            while await link.client.read(2**16):
                pass


async def _pass_answers(link: Link) -> None:
    while chunk := await link.server.read(2**16):
        fault, link.fault = link.fault, None
        if fault and fault.action == "delay answer":
            await asyncio.sleep(fault.seconds)
        elif fault:
            link.reset = fault.action == "drop answer"
            link.to_client.write(_instead(fault, chunk))
            await link.to_client.drain()
            return
        link.to_client.write(chunk)
        await link.to_client.drain()


def _instead(fault: Fault, chunk: bytes) -> bytes:
    """What a client gets instead of an answer that begins with `chunk`."""
    return {
        "drop answer": b"",
        "cut answer": chunk[: len(chunk) // 2],
        "500 after": _answer("500"),
        "garbage": _answer("200"),
        "noise": _NOISE,
    }[fault.action]


def _answer(status: str) -> bytes:
    head = f"HTTP/1.1 {status} Chaos\r\nContent-Type: text/html\r\nContent-Length: {len(_PAGE)}\r\n"
    return f"{head}Connection: close\r\nRetry-After: 1\r\n\r\n".encode() + _PAGE


class Proxies:
    """Several proxies, served by one thread for as long as the block lasts."""

    def __init__(self, proxies: dict[str, Proxy]) -> None:
        self.of = proxies
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        for proxy in self.of.values():
            asyncio.run_coroutine_threadsafe(proxy.listen(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(_end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
