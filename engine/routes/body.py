"""Content of requests: bounded reading of bodies, parsing, digests of repeated requests, and pages of lists.

Large bodies are decompressed and parsed on another thread, so that the event loop keeps serving other clients.
"""

from __future__ import annotations

import asyncio
import json
import json.scanner
import re
from hashlib import blake2b
from typing import Annotated, Any, TypeVar

import zstandard
from fastapi import Query
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from engine.errors import RequestError

Model = TypeVar("Model", bound=BaseModel)
JsonObject = dict[str, Any]
Limit = Annotated[int, Query(ge=0, le=10_000)]
Offset = Annotated[int, Query(ge=0)]

MAX_JSON_VALUES = 2**21  # enough for 100 targets at each of 8,192 positions of a prompt, in sparse form
MAX_METADATA_LENGTH = 65_536  # characters
MAX_MODEL_SEQ_ID = 10**9 - 1  # names of checkpoints have room for nine digits
_MAX_SEQ_ID = 2**63 - 1
_MAX_ID = 512
_MANY_VALUES = 2**15
_MANY_BYTES = 2**20
_LONG_INTEGER = re.compile(r"[0-9]{19}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read and decompress a body; reject it as soon as it exceeds ``max_bytes``, compressed or not.

    Raises:
        RequestError: the body is too long, is not valid zstd, or has another encoding.
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
    return await asyncio.to_thread(_decompress, body, max_bytes)


async def read_json(request: Request, max_bytes: int) -> JsonObject:
    """Read a body as a JSON object of valid Unicode and integers of up to 64 bits.

    Raises:
        RequestError: the body is something else, is too long, or has too many values.
    """
    body = await read_body(request, max_bytes)
    num_values = body.count(b",") + 1
    if num_values > MAX_JSON_VALUES:
        raise RequestError(f"The body has about {num_values} values, more than {MAX_JSON_VALUES}: send less at once.")
    if num_values > _MANY_VALUES or len(body) > _MANY_BYTES:
        content = await asyncio.to_thread(_decode, body, _PythonDecoder)
    else:
        content = _decode(body, json.JSONDecoder)
    if not isinstance(content, dict):
        raise RequestError(f"The body is a JSON {type(content).__name__}; send an object.")
    return content


class _PythonDecoder(json.JSONDecoder):
    """JSON decoder in Python. The one in C is faster, but holds the interpreter's lock until it ends."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scan_once = json.scanner.py_make_scanner(self)  # pyright: ignore[reportAttributeAccessIssue]


def _decode(body: bytes, decoder: type[json.JSONDecoder]) -> object:
    try:
        text = body.decode()
        # The decoder in C is much faster without a function for integers, so search for long ones first. Bodies for the
        # decoder in Python are not searched, because the search would hold the interpreter's lock.
        has_long = decoder is _PythonDecoder or _LONG_INTEGER.search(text)
        content = decoder(parse_int=_int64 if has_long else None).decode(text)
        if _SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode()  # fails if a surrogate has no pair
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The body has the unpaired surrogate {error.object[error.start]!a} in a text: send valid Unicode."
        ) from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from error
    return content


def _int64(digits: str) -> int:
    # 20 characters are enough for 64 bits; to convert a very long text would take long.
    if len(digits) <= 20 and -(2**63) <= (number := int(digits)) < 2**63:
        return number
    shown = digits if len(digits) <= 20 else f"{digits[:20]}..."
    raise RequestError(f"The body has the integer {shown}, which needs more than 64 bits: send a smaller one.")


def _decompress(body: bytes, max_bytes: int) -> bytes:
    try:
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body) as reader:
            plain = reader.read(max_bytes + 1)
    except zstandard.ZstdError as error:
        raise RequestError(f"The body is not a valid zstd stream: {error}.") from error
    if len(plain) > max_bytes:
        raise RequestError(_too_long(max_bytes))
    return plain


def parse(model: type[Model], content: JsonObject, strict: bool = True) -> Model:
    """Validate ``content`` as a type of the Tinker protocol.

    Args:
        strict: do not convert values, such as a boolean to a number. False for types with times, which arrive as texts.

    Raises:
        RequestError: a field is invalid.
    """
    try:
        return model.model_validate(content, strict=strict)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        raise RequestError(f"{model.__name__}: {field}: {first['msg']}.") from error


def digest(kind: str, content: JsonObject) -> bytes:
    """Return 16 bytes that are equal for equal requests."""
    return blake2b(f"{kind}:{json.dumps(content, sort_keys=True)}".encode(), digest_size=16).digest()


def read_id(content: JsonObject, name: str) -> str:
    """Return the id in the field ``name``; raises a RequestError if it is not a string, or is too long."""
    value = content.get(name)
    if not isinstance(value, str) or len(value) > _MAX_ID:
        raise RequestError(f"{name} is {str(value)[:80]!r}; send a string of up to {_MAX_ID} characters.")
    return value


def read_seq_id(content: JsonObject, name: str) -> int:
    """Return the seq id in the field ``name``.

    Raises:
        RequestError: the field is not an integer in the range of this seq id.
    """
    value = content.get(name)
    if type(value) is not int:
        raise RequestError(f"{name} is {str(value)[:80]!r}; send an integer of at least 0.")
    return check_seq_id(value, name)


def check_seq_id(value: int, name: str) -> int:
    """Return ``value`` if it is in the range of the seq id ``name``; raises a RequestError otherwise."""
    largest = _MAX_SEQ_ID if name == "seq_id" else MAX_MODEL_SEQ_ID
    if not 0 <= value <= largest:
        raise RequestError(f"{name} is {value}; use 0 to {largest}.")
    return value


def check_metadata(metadata: object) -> dict[str, str]:
    """Return the ``user_metadata`` of a request; an empty dict for None.

    Raises:
        RequestError: the metadata is not an object with string values, or is too long.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise RequestError(f"user_metadata is {str(metadata)[:80]!r}; send an object with string values.")
    if sum(len(key) + len(value) for key, value in metadata.items()) > MAX_METADATA_LENGTH:
        raise RequestError(f"user_metadata is longer than {MAX_METADATA_LENGTH} characters: shorten it.")
    return metadata


def _too_long(max_bytes: int) -> str:
    return f"The body is longer than {max_bytes} bytes: send smaller batches."
