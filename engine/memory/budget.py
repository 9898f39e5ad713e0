"""Memory budget of adapters, moments and snapshots: the least recently used ones are evicted to disk."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import safetensors.torch
from filelock import FileLock
from torch import Tensor

from engine.checkpoints.files import disk_errors
from engine.checkpoints.store import pack
from engine.errors import EngineError

log = logging.getLogger(__name__)


class Evictable(Protocol):
    """Large object that can move to disk and back, bit for bit."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def is_busy(self) -> bool:
        """True while in use, when an eviction would free nothing or lose something."""
        ...

    def evict(self) -> None:
        """Move to disk."""
        ...


class MemoryBudget:
    """Tracks the evictable objects in memory.

    Only the compute thread calls `touch`, `write` and `read`; any thread may use the rest.

    Attributes:
        num_bytes: size of the objects in memory.
        num_evictions: number of evictions so far.
    """

    def __init__(self, limit_bytes: int, folder: Path) -> None:
        """Create and lock a subfolder for the evicted objects of this engine.

        Args:
            limit_bytes: size of the objects in memory above which objects are evicted. Objects in use count but are
                not evicted, so they may exceed the limit.
            folder: parent folder, which several engines may share.
        """
        self.num_evictions = 0
        self._limit_bytes = limit_bytes
        self._sizes: OrderedDict[Evictable, int] = OrderedDict()
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # until this engine's folder is locked, another engine would remove it
            _remove_abandoned(folder)
            self._folder = folder / uuid.uuid4().hex
            self._folder.mkdir()
            self._lock = _lock(self._folder)

    @property
    def num_bytes(self) -> int:
        return sum(list(self._sizes.values()))

    def touch(self, item: Evictable) -> None:
        """Mark ``item`` as in memory and most recently used; evict others if the budget is exceeded."""
        size = item.num_bytes
        self._sizes.pop(item, None)  # not `move_to_end`, because another thread may remove it
        self._sizes[item] = size
        excess = self.num_bytes - self._limit_bytes
        if excess <= 0:
            return
        for other in list(self._sizes):
            if excess <= 0:
                return
            if other is item or other.is_busy:
                continue
            try:
                other.evict()
            except EngineError as error:
                log.warning("%s", error)  # the object stays in memory, beyond the budget
                return
            excess -= self._sizes.get(other, 0)
            self.remove(other)
            self.num_evictions += 1

    def remove(self, item: Evictable) -> None:
        """Stop tracking ``item``, which was freed or evicted."""
        self._sizes.pop(item, None)

    def write(self, tensors: Mapping[str, Tensor]) -> Path:
        """Write tensors to a new file, which the caller deletes; `close` deletes the remaining files."""
        path = self._folder / f"{uuid.uuid4().hex}.safetensors"
        with disk_errors("Tensors to evict from memory"):
            path.write_bytes(pack(tensors))
        return path

    def read(self, path: Path) -> dict[str, Tensor]:
        """Read the tensors of a file written by `write`."""
        return safetensors.torch.load(path.read_bytes())

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(folder: Path) -> None:
    """Remove the subfolders of killed engines."""
    for subfolder in folder.iterdir():
        try:
            os.close(_lock(subfolder))
        except (BlockingIOError, FileNotFoundError):
            continue  # its engine is running, or another engine removes it too
        shutil.rmtree(subfolder, ignore_errors=True)


def _lock(folder: Path) -> int:
    """Lock ``folder``; return the descriptor, which unlocks it when it is closed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor
