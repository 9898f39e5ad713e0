"""Variable-length integers of the protobuf wire format."""

from __future__ import annotations


def read_varint(body: bytes | bytearray, position: int) -> tuple[int, int]:
    """Return the integer at ``position`` and the position after it.

    Raises:
        IndexError: the body ends within the integer.
        ValueError: the integer has more than ten bytes.
    """
    value = 0
    for shift in range(0, 70, 7):
        byte = body[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number has more than ten bytes")
