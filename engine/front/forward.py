"""Forwarding of requests to engines.

A request is held in memory until its session id is found, and a long response to a client is streamed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from yarl import URL

from engine.front.processes import EngineProcess
from engine.front.upload import Upload

_RESTART_WAIT_S = 25.0  # for a restart, and for the connection after it; the SDK times out after 45 s
_SHORT_BYTES = 2**16  # a response up to this size is sent when it is complete
_IDLE_CONNECTION_S = 3.0  # uvicorn closes idle connections after 5 s
# Headers that are not forwarded: those of one connection (RFC 9110, section 7.6.1), `trailer`, and those that the front
# handles or sets itself.
_CONNECTION = frozenset(
    ("connection", "proxy-connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "expect")
)
_NOT_FORWARDED = _CONNECTION | {"x-forwarded-for", "x-forwarded-proto"}

Headers = list[tuple[str, str]]


class EngineUnavailable(Exception):
    """Engine that does not respond; the message is one sentence for the user.

    The SDK repeats a request with this error, as it does after a lost connection. Engines recognize repeats.
    """

    def __init__(self, engine: EngineProcess) -> None:
        super().__init__(f"{engine.name} does not respond and is being restarted: send the request again.")


@dataclass(frozen=True, slots=True)
class Reply:
    """Complete response of an engine."""

    status: int
    media_type: str
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def response(self) -> Response:
        """Return the same response for the client."""
        return Response(self.body, self.status, media_type=self.media_type)


class EngineClient:
    """HTTP client of the engines."""

    def __init__(self) -> None:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_CONNECTION_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_RESTART_WAIT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
        await self._http.close()

    async def forward(self, request: Request, engine: EngineProcess, upload: Upload) -> Response:
        """Send a request of a client to an engine, and return its response; a long one is streamed.

        Raises:
            EngineUnavailable: the engine does not respond.
        """
        path = request.scope["raw_path"].decode("latin-1")
        target = f"{path}?{request.url.query}" if request.url.query else path
        # A complete upload is all in `prefix`.
        body = (bytes(upload.prefix) or None) if upload.is_complete else upload.chunks()
        upstream = await self._send(engine, request.method, target, _headers(request), body)
        length = upstream.content_length
        if length is not None and length <= _SHORT_BYTES:
            response = Response(await _read(engine, upstream), upstream.status)
        else:
            response = StreamingResponse(_chunks(upstream), upstream.status)
        response.raw_headers = [
            (name.lower(), value)
            for name, value in upstream.raw_headers
            if name.decode("latin-1").lower() not in _NOT_FORWARDED
        ]
        return response

    async def ask(self, request: Request, engine: EngineProcess, target: str, content: object = None) -> Reply:
        """Send a request on behalf of a client, with the client's API key, and read the whole response.

        Args:
            target: path and query.
            content: JSON body of a POST; None sends a GET.

        Raises:
            EngineUnavailable: the engine does not respond.
        """
        sent = None if content is None else json.dumps(content).encode()
        headers = [
            (name, value) for name, value in _headers(request) if name not in ("content-length", "content-encoding")
        ]
        upstream = await self._send(engine, "GET" if sent is None else "POST", target, headers, sent)
        body = await _read(engine, upstream)
        return Reply(upstream.status, upstream.headers.get("Content-Type", ""), body)

    async def _send(
        self,
        engine: EngineProcess,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | AsyncIterator[bytes] | None,
    ) -> aiohttp.ClientResponse:
        try:
            if not engine.is_up.is_set():
                await asyncio.wait_for(engine.is_up.wait(), _RESTART_WAIT_S)
            url = URL(f"{engine.url}{target}", encoded=True)
            return await self._http.request(method, url, headers=headers, data=body, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise EngineUnavailable(engine) from error


def _headers(request: Request) -> Headers:
    client = [("x-forwarded-for", request.client.host)] if request.client else []
    forwarded = [(name, value) for name, value in request.headers.items() if name not in _NOT_FORWARDED]
    return [*forwarded, *client, ("x-forwarded-proto", request.url.scheme)]


async def _read(engine: EngineProcess, upstream: aiohttp.ClientResponse) -> bytes:
    try:
        async with upstream:
            return await upstream.read()
    except aiohttp.ClientError as error:
        raise EngineUnavailable(engine) from error


async def _chunks(upstream: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with upstream:
        async for chunk in upstream.content.iter_any():
            yield chunk
