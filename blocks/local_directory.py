"""A run's directory on local disk."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Self

from blocks.errors import storage_error
from blocks.holder import refusal, this_process


class LocalDirectory:
    """A `RunDirectory` on local disk; the lock goes with the process that holds it, also after a kill -9."""

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        self._path = path
        self._lock: int | None = None

    def read_bytes(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error("read", self._path / name, error) from error

    def write_bytes(self, name: str, content: bytes) -> None:
        self._make()
        path = self._path / name
        temporary = path.with_name(f".{name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_entries(self._path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise storage_error("write", path, error) from error

    def append_line(self, name: str, line: str) -> None:
        self._make()
        path = self._path / name
        try:
            is_new = not path.exists()
            # No buffer: what could not be written must not be tried again when the file is closed.
            with path.open("ab+", buffering=0) as file:
                end = file.seek(0, os.SEEK_END)
                is_torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
                rest = (b"\n" if is_torn else b"") + line.encode() + b"\n"
                try:
                    while rest:
                        rest = rest[file.write(rest) :]
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(end)  # a full disk must not leave half a record
                    raise
            if is_new:
                _sync_entries(self._path)
        except OSError as error:
            raise storage_error("append to", path, error) from error

    def holder(self) -> str:
        path = self._path / ".lock"
        try:
            with path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return ""
        except BlockingIOError:
            return path.read_text() or "another process"
        except OSError as error:
            raise storage_error("look at", path, error) from error
        return ""

    def __enter__(self) -> Self:
        self._make()
        path = self._path / ".lock"
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            _take(self._lock)
            os.ftruncate(self._lock, 0)
            os.write(self._lock, str(this_process()).encode())
            for left in self._path.glob(".*.tmp"):  # by a process that was killed while it wrote
                left.unlink()
        except BlockingIOError as error:
            self.__exit__()
            raise refusal(self.location, path.read_text() or "another process") from error
        except OSError as error:
            self.__exit__()
            raise storage_error("lock", path, error) from error
        return self

    def _make(self) -> None:
        """Make the directory, when it is first written to: who only reads leaves no trace."""
        if self._path.is_dir():
            return
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            _sync_entries(self._path.parent)
        except OSError as error:
            raise storage_error("make", self._path, error) from error

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _take(lock: int) -> None:
    """Lock a file, with a moment's patience for somebody who only looks whether it is locked."""
    for _ in range(5):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        else:
            return
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_entries(directory: Path) -> None:
    """Make the names in a directory durable; a file's own fsync does not."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
