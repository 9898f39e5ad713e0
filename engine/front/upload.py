"""Body of a request on its way to an engine, and the session that the request concerns."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator

import zstandard
from pydantic_core import from_json
from starlette.requests import Request

from engine.routes.body import MAX_JSON_VALUES
from engine.wire.fields import read_field

_IN_PATH = re.compile(r"(?:/api/v1)?/(?:sessions|samplers|training_runs|runs|external)/([^/]+)")
_IN_JSON = ("session_id", "model_id", "sampling_session_id", "request_id")
_MODEL_ID_FIELD = 1  # of ForwardBackwardRequest
_MAX_FIELDS = 2**20  # before the model's id; an engine accepts about as many datums
_FIRST_BYTES = 2**16  # of a compressed body: the SDK sends the model's id first
_LARGE_BYTES = 2**20  # searched on another thread


class Upload:
    """Body of a request. It is read until the session's id is found; the rest is only passed on.

    Attributes:
        prefix: the part of the body that has been read.
        is_complete: True if `prefix` is the whole body.
    """

    def __init__(self, request: Request, max_bytes: int) -> None:
        """Open the body.

        Args:
            max_bytes: limit of `prefix`. The engines reject a longer body, compressed or not.
        """
        self.prefix = bytearray()
        self.is_complete = False
        self._path = request.url.path
        self._length = request.headers.get("content-length")
        self._encoding = request.headers.get("content-encoding", "identity")
        self._stream = request.stream()
        self._max_bytes = max_bytes

    async def session_id(self) -> str | None:
        """Return the session in the path or in the body; None if there is none, or if the body is invalid."""
        if in_path := _IN_PATH.match(self._path):
            return in_path[1].partition(":")[0]
        num_searched = 0
        async for chunk in self._stream:
            self.prefix += chunk
            self.is_complete = self._length == str(len(self.prefix))
            if len(self.prefix) > self._max_bytes:
                return None
            if len(self.prefix) >= 2 * num_searched:
                if (owned_id := await self._search(_FIRST_BYTES)) is not None:
                    return owned_id.partition(":")[0]
                num_searched = len(self.prefix)
        self.is_complete = True
        owned_id = await self._search(self._max_bytes)
        return None if owned_id is None else owned_id.partition(":")[0]

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the whole body, once."""
        yield bytes(self.prefix)
        if not self.is_complete:
            async for chunk in self._stream:
                yield chunk

    async def _search(self, max_bytes: int) -> str | None:
        """Search `prefix` for an id that begins with that of a session; decompress up to ``max_bytes`` of it."""
        find = _model_id if self._path.endswith("/forward_backward") else _json_id

        def search() -> str | None:
            try:
                return find(self._plain(max_bytes))
            except (ValueError, IndexError, zstandard.ZstdError):
                return None  # incomplete or invalid, which the engine reports

        is_large = len(self.prefix) > _LARGE_BYTES or (self._encoding == "zstd" and max_bytes > _FIRST_BYTES)
        return await asyncio.to_thread(search) if is_large else search()

    def _plain(self, max_bytes: int) -> bytes | bytearray:
        if self._encoding != "zstd":
            return self.prefix
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(io.BytesIO(self.prefix)) as reader:
            return reader.read(max_bytes)


def _json_id(body: bytes | bytearray) -> str | None:
    """Return the first id of an object, of which ``body`` may be only the beginning.

    >>> _json_id(b'{"session_id": null, "model_id": "a:train:0", "path": "tink')
    'a:train:0'
    >>> _json_id(b'{"user_metadata": {"session_id": "b"}, "session_id": "a"}')
    'a'
    >>> _json_id(b'{"target": {"sampling_session_id": "a:sample:0"}}')
    'a:sample:0'
    """
    if body.count(b",") >= MAX_JSON_VALUES:
        return None  # the engine rejects it unparsed
    content = from_json(body, allow_partial=True)
    if not isinstance(content, dict):
        return None
    target = content.get("target")
    nested = [target.get("sampling_session_id")] if isinstance(target, dict) else []
    ids = [value for value in (*(content.get(key) for key in _IN_JSON), *nested) if isinstance(value, str)]
    return ids[0] if ids else None


def _model_id(body: bytes | bytearray) -> str | None:
    """Return the model of a ForwardBackwardRequest, of which ``body`` may be only the beginning.

    >>> _model_id(bytes([2 << 3, 5, 1 << 3 | 2, 3]) + b"a:t")
    'a:t'
    """
    position = 0
    for _ in range(_MAX_FIELDS):
        field = read_field(body, position)
        if not field.number:
            raise ValueError("a field has the number 0")
        if field.number == _MODEL_ID_FIELD and field.has_length:
            return body[field.start : field.end].decode() if field.end <= len(body) else None
        position = field.end
    return None
