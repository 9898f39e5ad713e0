"""Fields of protobuf messages, read one by one without parsing the message."""

from __future__ import annotations

from typing import NamedTuple


class Field(NamedTuple):
    """Position of a field in a message.

    Attributes:
        number: number of the field.
        start, end: first byte of the value, and the byte after it; `end` may lie beyond an incomplete message.
        has_length: True for strings, bytes, messages and packed numbers, whose value is ``body[start:end]``.
    """

    number: int
    start: int
    end: int
    has_length: bool


def read_field(body: bytes | bytearray, position: int) -> Field:
    """Return the field whose header is at ``position``.

    Raises:
        IndexError: the body ends within a number.
        ValueError: the field has no valid header.
    """
    tag, start = _read_varint(body, position)
    number = tag >> 3
    match tag & 7:
        case 0:
            _, end = _read_varint(body, start)
            return Field(number, start, end, has_length=False)
        case 1:
            return Field(number, start, start + 8, has_length=False)
        case 2:
            length, start = _read_varint(body, start)
            return Field(number, start, start + length, has_length=True)
        case 5:
            return Field(number, start, start + 4, has_length=False)
        case kind:
            raise ValueError(f"a field has the wire type {kind}")


def _read_varint(body: bytes | bytearray, position: int) -> tuple[int, int]:
    """Return the integer at ``position`` and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = body[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number has more than ten bytes")
