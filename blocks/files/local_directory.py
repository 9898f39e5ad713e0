"""Run directory on local disk."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import Self

from blocks.errors import LostRunError, StorageError, storage_error
from blocks.files.local import open_private, private_folder
from blocks.files.lock_holder import current_process, locked_error, removed_error


class LocalDirectory:
    """`RunDirectory` on local disk, readable by its owner only.

    The lock is released when its process ends, even by kill -9.
    """

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
        self._create()
        path = self._path / name
        temporary = path.with_name(f".{name}.{os.getpid()}.tmp")
        try:
            with open_private(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_entries(self._path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._error("write", path, error) from error

    def append_line(self, name: str, line: str) -> None:
        self._create()
        path = self._path / name
        try:
            is_new = not path.exists()
            # Unbuffered, so that closing the file does not retry a failed write.
            with open_private(path, "ab+", buffering=0) as file:
                end = file.seek(0, os.SEEK_END)
                is_torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
                unwritten = (b"\n" if is_torn else b"") + line.encode() + b"\n"
                try:
                    while unwritten:
                        unwritten = unwritten[file.write(unwritten) :]
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(end)  # remove the partial record that a full disk leaves
                    raise
            if is_new:
                _sync_entries(self._path)
        except OSError as error:
            raise self._error("append to", path, error) from error

    def names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self._path.iterdir() if entry.name != ".lock")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error("list", self._path, error) from error

    def remove(self, name: str) -> None:
        self.check_writer()
        path = self._path / name
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            _sync_entries(self._path)
        except OSError as error:
            raise storage_error("remove", path, error) from error

    def check_writer(self) -> None:
        if self._lock is None:
            return
        path = self._path / ".lock"
        held = os.fstat(self._lock)
        try:
            current = path.stat()
        except FileNotFoundError:
            current = None
        except OSError as error:
            raise storage_error("inspect", path, error) from error
        if current is None or (current.st_dev, current.st_ino) != (held.st_dev, held.st_ino):
            raise removed_error(self.location)

    def writer(self) -> str:
        path = self._path / ".lock"
        try:
            with path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return ""
        except BlockingIOError:
            return path.read_text() or "another process"
        except OSError as error:
            raise storage_error("inspect", path, error) from error
        return ""

    def __enter__(self) -> Self:
        self._create()
        path = self._path / ".lock"
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            _acquire(self._lock)
            self.check_writer()
            os.ftruncate(self._lock, 0)
            os.write(self._lock, str(current_process()).encode())
            for temporary in self._path.glob(".*.tmp"):  # leftovers of a process that was killed during a write
                temporary.unlink()
        except BlockingIOError as error:
            self.__exit__()
            raise locked_error(self.location, path.read_text() or "another process") from error
        except LostRunError:
            self.__exit__()
            raise
        except OSError as error:
            self.__exit__()
            raise storage_error("lock", path, error) from error
        return self

    def _create(self) -> None:
        """Create the directory before the first write; a reader creates nothing."""
        if self._lock is not None:
            self.check_writer()
            return
        if self._path.is_dir():
            return
        try:
            private_folder(self._path)
            _sync_entries(self._path.parent)
        except OSError as error:
            raise storage_error("create", self._path, error) from error

    def _error(self, verb: str, path: Path, error: OSError) -> StorageError:
        """Build the error of a failed write, which the removal of the whole directory may have caused."""
        try:
            self.check_writer()
        except LostRunError as lost:
            return lost
        return storage_error(verb, path, error)

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _acquire(lock: int) -> None:
    """Lock a file; retry for 0.1 s, because `writer` holds a shared lock for a moment."""
    for _ in range(5):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        else:
            return
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_entries(directory: Path) -> None:
    """Flush the entries of a directory to disk; fsync of a file does not cover its name."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
