"""Plain data by key, computed once: in memory, and as lines that a run appends to a file of its own."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Collection, Mapping
from typing import Any


class CorruptKeptError(Exception):
    """Saved data in which more than the last line is broken."""


class Kept:
    """Values that JSON can hold, by key. A line is a checksum and the JSON of ``{key: value}``."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}
        self._unsaved: dict[str, Any] = {}
        self._lock = threading.Lock()

    def find(self, keys: Collection[str]) -> dict[str, Any]:
        """What is known of these keys."""
        return {key: self._known[key] for key in set(keys) & self._known.keys()}

    def keep(self, values: Mapping[str, Any]) -> None:
        """Take in what is new."""
        with self._lock:
            self._known |= values
            self._unsaved |= values

    def load(self, content: bytes) -> int:
        """Take in what was saved; returns how many bytes of it are whole: a crash leaves a torn last line.

        Raises:
            CorruptKeptError: another line is broken; nothing of it is taken.
        """
        lines = content.split(b"\n")
        found: dict[str, Any] = {}
        num_bytes = 0
        for index, line in enumerate(lines[:-1]):
            values = _read(line)
            if values is None:
                if index < len(lines) - 2 or lines[-1]:
                    raise CorruptKeptError(f"line {index + 1} of {len(lines) - 1} is broken")
                break
            found |= values
            num_bytes += len(line) + 1
        with self._lock:
            self._known |= found
        return num_bytes

    def take_unsaved(self) -> str | None:
        """A line with everything that is new since the last one; None where nothing is."""
        with self._lock:
            new, self._unsaved = self._unsaved, {}
        if not new:
            return None
        text = json.dumps(new, separators=(",", ":"))
        return f"{zlib.crc32(text.encode()):08x} {text}"


def _read(line: bytes) -> dict[str, Any] | None:
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None
