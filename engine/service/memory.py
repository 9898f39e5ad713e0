"""Adapters, moments and snapshots in memory, up to a bound: the least recently used wait on disk."""

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
from torch import Tensor

from engine.checkpoints.files import disk_errors
from engine.checkpoints.store import pack
from engine.errors import EngineError

log = logging.getLogger(__name__)


class Resident(Protocol):
    """Something large that can leave memory and come back, bit for bit."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def is_busy(self) -> bool:
        """Whether it is at work, so that leaving would free nothing or lose something."""
        ...

    def leave(self) -> None:
        """Go to disk."""
        ...


class Memory:
    """Only the compute thread uses it, `forget` aside.

    Attributes:
        num_bytes: what is in memory now.
        num_evictions: how often something had to leave.
    """

    def __init__(self, limit_bytes: int, folder: Path) -> None:
        """Args:
        limit_bytes: what may be in memory, the resident in use aside.
        folder: where the others go, each engine into a folder of its own in it.
        """
        self.num_evictions = 0
        self._limit_bytes = limit_bytes
        self._sizes: OrderedDict[Resident, int] = OrderedDict()
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        self._folder = folder / uuid.uuid4().hex
        self._folder.mkdir()
        self._lock = _lock(self._folder)

    @property
    def num_bytes(self) -> int:
        return sum(list(self._sizes.values()))

    def used(self, resident: Resident) -> None:
        """Note that ``resident`` is in memory and in use; make room for it if there is too little."""
        self._sizes[resident] = resident.num_bytes
        self._sizes.move_to_end(resident)
        excess = self.num_bytes - self._limit_bytes
        if excess <= 0:
            return
        for other in list(self._sizes):
            if excess <= 0:
                return
            if other is resident or other.is_busy:
                continue
            try:
                other.leave()
            except EngineError as error:
                log.warning("%s", error)  # it stays, and the bound does not hold
                return
            excess -= self._sizes.get(other, 0)
            self.forget(other)
            self.num_evictions += 1

    def forget(self, resident: Resident) -> None:
        """``resident`` is gone, or on disk."""
        self._sizes.pop(resident, None)

    def write(self, tensors: Mapping[str, Tensor]) -> Path:
        """Put tensors into a file of their own, which is the caller's to remove; it ends with the engine."""
        path = self._folder / f"{uuid.uuid4().hex}.safetensors"
        with disk_errors("What had to leave memory"):
            path.write_bytes(pack(tensors))
        return path

    def read(self, path: Path) -> dict[str, Tensor]:
        """What `write` wrote."""
        return safetensors.torch.load(path.read_bytes())

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what engines left behind that were killed."""
    for left in folder.iterdir():
        try:
            os.close(_lock(left))
        except (BlockingIOError, FileNotFoundError):
            continue  # its engine lives, or another one sweeps too
        shutil.rmtree(left, ignore_errors=True)


def _lock(folder: Path) -> int:
    """Hold ``folder`` until this process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor
