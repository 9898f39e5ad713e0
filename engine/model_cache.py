"""Cache of model directories, readable by all users. Each is built once, appears atomically and never changes."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

log = logging.getLogger(__name__)


class ModelError(ValueError):
    """Model that cannot be found, built or loaded; the message is one sentence for the user."""


def make_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Return ``directory``; on the first call of any process, build it with ``make(empty_directory)``.

    ``make`` writes into a temporary sibling directory, which is renamed after a flush. A process killed
    meanwhile leaves only the temporary directory, and the next call starts over. Concurrent processes wait
    for the first one.
    """
    if directory.is_dir():
        return directory
    if not directory.parent.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.parent.chmod(0o755)
    with FileLock(directory.with_name(f".{directory.name}.lock")):
        if directory.is_dir():
            return directory
        partial = directory.with_name(f".{directory.name}.partial")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        log.warning("Building the model directory %s; this happens once and can take half a minute", directory)
        make(partial)
        _share(partial)
        _flush(partial)
        partial.rename(directory)
    return directory


def _share(directory: Path) -> None:
    """Make a directory and its files readable by all, whatever the umask and the libraries that wrote the files."""
    directory.chmod(0o755)
    for path in directory.iterdir():
        path.chmod(0o644)


def _flush(directory: Path) -> None:
    """Flush the files, then the directory, so that the rename never survives a power cut that loses the files."""
    for path in (*directory.iterdir(), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
