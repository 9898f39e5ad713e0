"""Request bodies: bounded reading, parsing, and digests that identify repeated requests."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any, TypeVar

import zstandard
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from engine.errors import RequestError

Model = TypeVar("Model", bound=BaseModel)
JsonObject = dict[str, Any]


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read and decompress a body without ever holding more than ``max_bytes``.

    Raises:
        RequestError: the body is too long, or is not valid zstd.
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
        raise RequestError(f"The body is not a valid zstd stream: {error}.") from error
    if len(plain) > max_bytes:
        raise RequestError(_too_long(max_bytes))
    return plain


async def read_json(request: Request, max_bytes: int) -> JsonObject:
    """Read a body as a JSON object.

    Raises:
        RequestError: the body is not a JSON object.
    """
    try:
        content = json.loads(await read_body(request, max_bytes))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise RequestError(f"The body is a JSON {type(content).__name__}; send an object.")
    return content


def parse(model: type[Model], content: JsonObject) -> Model:
    """Validate ``content`` as a type of the Tinker protocol.

    Raises:
        RequestError: a field is invalid.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        raise RequestError(f"{model.__name__}: {field}: {first['msg']}.") from error


def digest(kind: str, content: JsonObject) -> bytes:
    """Return 16 bytes that are equal for equal requests."""
    return blake2b(f"{kind}:{json.dumps(content, sort_keys=True)}".encode(), digest_size=16).digest()


def read_seq_id(content: JsonObject, name: str) -> int:
    """Return the seq id in the field ``name``.

    Raises:
        RequestError: the field is not an integer of at least 0.
    """
    value = content.get(name)
    if not isinstance(value, int) or value < 0:
        raise RequestError(f"{name} is {value!r}; send an integer of at least 0.")
    return value


def _too_long(max_bytes: int) -> str:
    return f"The body is longer than {max_bytes} bytes: send smaller batches."
