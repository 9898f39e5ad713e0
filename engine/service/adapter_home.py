"""Where the adapter of one sampler is: in memory, in a checkpoint, or on disk until it is needed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from engine.checkpoints.checkpoint import ADAPTER, Checkpoint
from engine.checkpoints.store import CheckpointStore
from engine.compute.base import BaseModel
from engine.compute.lora import Adapter, LoraSpec
from engine.compute.trainer import adapter_tensors, copy_weights
from engine.service.memory import Memory


class AdapterHome:
    """Reads the adapter when it is needed. For the compute thread, `close` aside.

    Attributes:
        in_use: whether someone samples with it, so that leaving memory would free nothing.
    """

    def __init__(
        self, memory: Memory, base: BaseModel, spec: LoraSpec, read: Callable[[], Mapping[str, Tensor]] | None
    ) -> None:
        """Args:
        read: the tensors, each time they are needed; None where they are nowhere but in memory.
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
    def of_checkpoint(memory: Memory, base: BaseModel, store: CheckpointStore, checkpoint: Checkpoint) -> AdapterHome:
        return AdapterHome(memory, base, checkpoint.lora, lambda: store.read(checkpoint, ADAPTER))

    @staticmethod
    def of_snapshot(memory: Memory, base: BaseModel, adapter: Adapter) -> AdapterHome:
        home = AdapterHome(memory, base, adapter.spec, None)
        home._adapter = adapter
        memory.used(home)
        return home

    def adapter(self) -> Adapter:
        if self._adapter is None:
            assert self._read is not None
            adapter = self._base.new_adapter(self._spec)
            copy_weights(self._read(), adapter)
            self._adapter = adapter
        if not self._closed:
            self._memory.used(self)
        return self._adapter

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in adapter_tensors(self._adapter).values()) if self._adapter else 0

    @property
    def is_busy(self) -> bool:
        return self.in_use()

    def leave(self) -> None:
        assert self._adapter is not None
        if self._read is None:
            path = self._file = self._memory.write(adapter_tensors(self._adapter))
            # The file stays: a snapshot never changes, so it need not be written again.
            self._read = lambda: self._memory.read(path)
        self._adapter = None

    def close(self) -> None:
        """The sampler is gone."""
        self._closed = True
        self._memory.forget(self)
        if self._file is not None:
            self._file.unlink(missing_ok=True)
