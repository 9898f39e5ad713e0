"""What a session must know of itself after kill -9: one file of JSON lines, each appended by one write.

A write that has returned is the operating system's and outlives the process; only a power cut can lose it, and
checkpoints are flushed to the disk by themselves. So a record costs microseconds and no flush. The results of
passes and of sampling are not kept: they would be most of the bytes, and what they were computed for is lost
with the process or can be asked again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

Record = dict[str, Any]


class Journal:
    """The file of one living session; while it is open, no other engine can open it."""

    def __init__(self, path: Path) -> None:
        """Raises:
        BlockingIOError: another engine has it open.
        """
        self._path = path
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise

    def read(self) -> list[Record]:
        """All records; a last one that a kill tore is cut off."""
        content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if self._file is not None and whole < len(content):
            os.ftruncate(self._file, whole)
        return [json.loads(line) for line in content[:whole].splitlines()]

    def append(self, record: Record) -> None:
        """Add a record; nothing once the journal is closed."""
        if self._file is None:
            return
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self._file, line)
        except OSError as error:
            written = error
        if written != len(line):
            # A journal with a hole would bring back a model that never was: better none.
            log.warning("%s cannot be written (%s): its session will not survive a restart", self._path, written)
            self.remove()

    def remove(self) -> None:
        """Close it for good: after a restart there is no such session."""
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
