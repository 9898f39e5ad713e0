"""Where this project keeps what it makes on this machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blocks.errors import StorageError, reason, storage_error


def home() -> Path:
    """`$TINKER_FLOWS_HOME`, or `.tinker-flows` in the current directory; made when missing.

    Raises:
        StorageError: it cannot be made or written to.
    """
    path = Path(os.environ.get("TINKER_FLOWS_HOME") or ".tinker-flows").resolve()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"The project's home {path} cannot be made ({reason(error)}): set TINKER_FLOWS_HOME to another directory."
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StorageError(
            f"The project's home {path} cannot be written to: set TINKER_FLOWS_HOME to another directory."
        )
    return path


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock file `path`, then hold it; the lock goes with its process."""
    try:
        lock = path.open("ab")
    except OSError as error:
        raise storage_error("lock", path, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
