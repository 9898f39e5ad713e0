"""Store of one sampler's adapter: in memory, in a checkpoint, or evicted to disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from engine.checkpoints.checkpoint import ADAPTER, Checkpoint
from engine.checkpoints.store import CheckpointStore
from engine.compute.base import BaseModel
from engine.compute.lora import Adapter, LoraSpec
from engine.compute.trainer import adapter_tensors, copy_weights
from engine.memory.budget import MemoryBudget


class AdapterStore:
    """Keeps one adapter and loads it when needed. Only the compute thread uses it, except for `close`.

    Attributes:
        in_use: returns True while a request samples with the adapter, so that an eviction would free nothing.
    """

    def __init__(
        self, memory: MemoryBudget, base: BaseModel, spec: LoraSpec, read: Callable[[], Mapping[str, Tensor]] | None
    ) -> None:
        """Create a store.

        Args:
            read: loads the adapter's tensors; None if they exist in memory only.
        """
        self.in_use: Callable[[], bool] = lambda: False
        self._memory = memory
        self._base = base
        self._spec = spec
        self._read = read
        self._adapter: Adapter | None = None
        self._file: Path | None = None
        self._closed = False

    @staticmethod
    def from_checkpoint(
        memory: MemoryBudget, base: BaseModel, checkpoints: CheckpointStore, checkpoint: Checkpoint
    ) -> AdapterStore:
        return AdapterStore(memory, base, checkpoint.lora, lambda: checkpoints.read(checkpoint, ADAPTER))

    @staticmethod
    def from_snapshot(memory: MemoryBudget, base: BaseModel, adapter: Adapter) -> AdapterStore:
        store = AdapterStore(memory, base, adapter.spec, None)
        store._adapter = adapter
        memory.touch(store)
        return store

    def adapter(self) -> Adapter:
        """Return the adapter, read first if it is not in memory.

        Raises:
            EngineError: the adapter's checkpoint was replaced or deleted, is damaged, or does not fit the base model.
        """
        if self._adapter is None:
            assert self._read is not None
            adapter = self._base.new_adapter(self._spec)
            copy_weights(self._read(), adapter)
            self._adapter = adapter
        if not self._closed:
            self._memory.touch(self)
        return self._adapter

    @property
    def num_bytes(self) -> int:
        return 0 if self._adapter is None else self._adapter.num_bytes

    @property
    def is_busy(self) -> bool:
        return self.in_use()

    def evict(self) -> None:
        assert self._adapter is not None
        if self._read is None:
            path = self._file = self._memory.write(adapter_tensors(self._adapter))
            # The file remains after the next load: a snapshot never changes, so it is written only once.
            self._read = lambda: self._memory.read(path)
        self._adapter = None

    def close(self) -> None:
        """Free the adapter and delete its file."""
        self._closed = True
        self._memory.remove(self)
        if self._file is not None:
            self._file.unlink(missing_ok=True)
