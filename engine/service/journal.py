"""Journal of an open session: one file of JSON lines, from which a restarted engine restores the session.

It records the opening of the session, a digest of each request of its models, their responses if these are JSON, the
last reproducible state of each model, and its samplers (`engine.service.history`). Each record is appended by one
write. Once a write has completed, the operating system keeps the data even if the process is killed; only a power cut
loses it. Records are therefore not flushed and cost microseconds. Checkpoints, which must survive a power cut, are
flushed. Results of passes and samples are not recorded: they would dominate the size. Training progress since the last
checkpoint is lost with the process anyway, and clients can sample again.
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
    """Journal file of one open session. A file lock keeps other engines out while it is open."""

    def __init__(self, path: Path) -> None:
        """Open and lock the file.

        Raises:
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
        """Read all records; truncate a last record that a kill cut short.

        Raises:
            ValueError: a record is not JSON or contains an unpaired surrogate.
        """
        content = self._path.read_bytes()
        complete = content.rfind(b"\n") + 1
        if self._file is not None and complete < len(content):
            os.ftruncate(self._file, complete)
        records = [json.loads(line) for line in content[:complete].splitlines()]
        # Raises for an unpaired surrogate: restored values go into responses, which must be valid UTF-8.
        json.dumps(records, ensure_ascii=False).encode()
        return records

    def append(self, record: Record) -> None:
        """Append a record; does nothing after the journal was closed."""
        if self._file is None:
            return
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        reason: OSError | str = "the disk is full"
        try:
            complete = os.write(self._file, line) == len(line)
        except OSError as error:
            complete, reason = False, error
        if not complete:
            # A journal with a missing record would restore a model that never existed, so restore none.
            log.warning("%s cannot be written (%s): its session will not survive a restart", self._path, reason)
            self.remove()

    def remove(self) -> None:
        """Close and delete the journal, so that a restart does not restore the session."""
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
