"""Files on this machine: the project home, private files, locks, and paths in configs."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from blocks.errors import ConfigError, StorageError, reason, storage_error


def home_path() -> Path:
    """Return the path of the project home: `$TINKER_FLOWS_HOME`, or `.tinker-flows` in the current directory."""
    return Path(os.environ.get("TINKER_FLOWS_HOME") or ".tinker-flows").resolve()


def home() -> Path:
    """Return the project home, the directory with databases, logs and runs; create it, for its owner only, if missing.

    Raises:
        StorageError: the directory cannot be created or written to.
    """
    path = home_path()
    try:
        private_folder(path)
    except OSError as error:
        raise StorageError(
            f"The project home {path} cannot be created ({reason(error)}): set TINKER_FLOWS_HOME to another directory."
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StorageError(f"The project home {path} is not writable: set TINKER_FLOWS_HOME to another directory.")
    return path


def private_folder(path: Path) -> None:
    """Create a folder and its missing parents, readable by their owner only.

    Raises:
        OSError: the folder cannot be created.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def open_private(path: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Open a file; a new file is readable by its owner only.

    Raises:
        OSError: the file cannot be opened.
    """
    return open(path, mode, buffering, opener=lambda name, flags: os.open(name, flags, 0o600))


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`; wait for other processes. A process that ends releases the lock.

    Raises:
        StorageError: the file cannot be opened.
    """
    try:
        lock = open_private(path, "ab")
    except OSError as error:
        raise storage_error("lock", path, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_absent(path: Path) -> None:
    """Check that nothing exists at the path of an output, and that its folder exists or can be created.

    Raises:
        StorageError: something exists there, or a file is in place of its folder.
    """
    if path.exists():
        raise StorageError(f"{path} already exists: choose another output or remove it.")
    existing = next(folder for folder in path.parents if folder.exists())
    if not existing.is_dir():
        raise StorageError(f"{path} cannot be created, because {existing} is a file: choose another output.")


def missing_file_error(file: str, field: str) -> ConfigError:
    """Build the error for a data file that does not exist; a relative path depends on the directory of the start."""
    if Path(file).is_absolute() or file.startswith("~"):
        return ConfigError(f"The data file {file} does not exist: set {field} to an existing file.")
    return ConfigError(
        f"The data file {file} does not exist in {Path.cwd()}: set {field} to an existing file; a run resumes in the "
        "directory where it was started."
    )


def path_of(text: str) -> Path | None:
    """Return the path that a text names, whether or not it exists; None if the text is empty or cannot be a path.

    >>> path_of("rows.jsonl")
    PosixPath('rows.jsonl')
    >>> path_of("") or path_of("~no-such-user/rows.jsonl") or path_of("a\\0b") or path_of("a" * 5000)
    """
    if not text:  # `Path("")` is the current directory
        return None
    try:
        path = Path(text).expanduser()
        path.resolve().exists()
    except (OSError, ValueError, RuntimeError):  # ValueError: a NUL; RuntimeError: ~name of an unknown user
        return None
    return path
