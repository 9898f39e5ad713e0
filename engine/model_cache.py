"""A cache of model directories: each is made once, appears whole or not at all, and is then only read."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

log = logging.getLogger(__name__)


class ModelError(ValueError):
    """A model that cannot be found, made or loaded; the message is one sentence for the user."""


def make_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Return ``directory``, made by ``make(empty_directory)`` on the first call of any process.

    The work happens in a neighbour of ``directory`` that is renamed when all of it is on disk, so a process
    killed on the way leaves nothing that is ever served; the next one starts anew. A second process waits
    for the first.
    """
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_name(f".{directory.name}.lock")):
        if directory.is_dir():
            return directory
        partial = directory.with_name(f".{directory.name}.partial")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        log.warning("Making %s, once for this cache: it can take half a minute", directory)
        make(partial)
        _flush(partial)
        partial.rename(directory)
    return directory


def _flush(directory: Path) -> None:
    """Files first, then the directory: a rename must not outlive what it names when the power goes."""
    for path in (*directory.iterdir(), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
