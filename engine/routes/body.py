"""Request bodies, of bounded size, and the digests that tell a repeat."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any, TypeVar

import zstandard
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from engine.errors import RequestError

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, decompressed; what is too long is not even kept.

    Raises:
        RequestError: it is too long, or not the zstd stream it claims to be.
    """
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise RequestError(_too_long(max_bytes))
        chunks.append(chunk)
    body = b"".join(chunks)
    encoding = request.headers.get("content-encoding")
    if encoding in (None, "identity"):
        return body
    if encoding != "zstd":
        raise RequestError(f"The body is encoded as {encoding!r}; send it plain or as zstd.")
    try:
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body) as reader:
            plain = reader.read(max_bytes + 1)
    except zstandard.ZstdError as error:
        raise RequestError(f"The body is no valid zstd stream: {error}.") from error
    if len(plain) > max_bytes:
        raise RequestError(_too_long(max_bytes))
    return plain


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        RequestError: it is none.
    """
    try:
        content = json.loads(await read_body(request, max_bytes))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is no JSON: {error}.") from error
    if not isinstance(content, dict):
        raise RequestError(f"The body is a JSON {type(content).__name__}; an object is expected.")
    return content


def parse(model: type[Model], content: dict[str, Any]) -> Model:
    """Validate ``content`` as one of the protocol's types.

    Raises:
        RequestError: it does not fit.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise RequestError(f"{model.__name__}: {where}: {first['msg']}.") from error


def digest(kind: str, content: dict[str, Any]) -> bytes:
    """16 bytes that equal requests share."""
    return blake2b(f"{kind}:{json.dumps(content, sort_keys=True)}".encode(), digest_size=16).digest()


def number(content: dict[str, Any], name: str) -> int:
    """A seq id of ``content``.

    Raises:
        RequestError: it is none.
    """
    value = content.get(name)
    if not isinstance(value, int) or value < 0:
        raise RequestError(f"{name} is {value!r}; send a number from 0 up.")
    return value


def _too_long(max_bytes: int) -> str:
    return f"The body is longer than {max_bytes} bytes: send smaller batches."
