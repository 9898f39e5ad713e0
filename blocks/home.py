"""Project home: the directory on this machine with databases, logs and runs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blocks.errors import StorageError, reason, storage_error


def home() -> Path:
    """Return `$TINKER_FLOWS_HOME`, or `.tinker-flows` in the current directory; create the directory if missing.

    Raises:
        StorageError: the directory cannot be created or written to.
    """
    path = Path(os.environ.get("TINKER_FLOWS_HOME") or ".tinker-flows").resolve()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"The project home {path} cannot be created ({reason(error)}): set TINKER_FLOWS_HOME to another directory."
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StorageError(f"The project home {path} is not writable: set TINKER_FLOWS_HOME to another directory.")
    return path


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`; wait for other processes. The lock ends with its process."""
    try:
        lock = path.open("ab")
    except OSError as error:
        raise storage_error("lock", path, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
