"""Key-value cache of JSON data in memory, which a run appends to a file line by line."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

JsonData: TypeAlias = Any  # as returned by `json.loads`


class CorruptCacheError(Exception):
    """Saved data with a broken line other than the last."""


class JsonlCache:
    """Cache of JSON values by key. A saved line is a checksum and the JSON of ``{key: value}``."""

    def __init__(self) -> None:
        self._values: dict[str, JsonData] = {}
        self._unsaved: dict[str, JsonData] = {}
        self._lock = threading.Lock()

    def find(self, keys: Collection[str]) -> dict[str, JsonData]:
        """Return the values by key, without the keys that are not cached."""
        return {key: self._values[key] for key in set(keys) & self._values.keys()}

    def put(self, values: Mapping[str, object]) -> None:
        """Add values to the cache."""
        with self._lock:
            self._values |= values
            self._unsaved |= values

    def load(self, content: bytes) -> int:
        """Load saved lines; return the number of valid bytes, because a crash can truncate the last line.

        Raises:
            CorruptCacheError: a line other than the last is broken; nothing is loaded.
        """
        lines = content.split(b"\n")
        loaded: dict[str, JsonData] = {}
        num_bytes = 0
        for index, line in enumerate(lines[:-1]):
            values = _read(line)
            if values is None:
                if index < len(lines) - 2 or lines[-1]:
                    raise CorruptCacheError(f"line {index + 1} of {len(lines) - 1} is broken")
                break
            loaded |= values
            num_bytes += len(line) + 1
        with self._lock:
            self._values |= loaded
        return num_bytes

    def pop_unsaved(self) -> str | None:
        """Return a line with all values added since the last call; None without new values."""
        with self._lock:
            new, self._unsaved = self._unsaved, {}
        if not new:
            return None
        text = json.dumps(new, separators=(",", ":"))
        return f"{zlib.crc32(text.encode()):08x} {text}"


def _read(line: bytes) -> dict[str, JsonData] | None:
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None
