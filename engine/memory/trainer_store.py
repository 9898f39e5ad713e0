"""Store of one model's trainer: in memory, evicted to disk, or not created yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.compute.trainer import Trainer
from engine.memory.budget import MemoryBudget


class TrainerStore:
    """Creates the trainer when it is first needed and restores it after an eviction; for the compute thread only."""

    def __init__(self, make: Callable[[], Trainer], memory: MemoryBudget, is_busy: Callable[[], bool]) -> None:
        """Create a store without its trainer.

        Args:
            make: creates the trainer in its initial state.
            is_busy: returns True while a request uses the trainer.
        """
        self._make = make
        self._memory = memory
        self._is_busy = is_busy
        self._trainer: Trainer | None = None
        self._file: Path | None = None
        self._closed = False

    def trainer(self) -> Trainer:
        """Return the trainer, created or restored first if it is not in memory."""
        if self._trainer is None:
            self._trainer = self._make()
            self._discard_file()
        if not self._closed:
            self._memory.touch(self)
        return self._trainer

    @property
    def num_bytes(self) -> int:
        return 0 if self._trainer is None else self._trainer.num_bytes

    @property
    def is_busy(self) -> bool:
        return self._is_busy()

    def evict(self) -> None:
        trainer = self._trainer
        assert trainer is not None
        path = self._file = self._memory.write(trainer.tensors())
        base, spec, gradient_error = trainer.base, trainer.adapter.spec, trainer.gradient_error
        micro_batch_tokens = trainer.micro_batch_tokens

        def restore() -> Trainer:
            restored = Trainer(base, spec, micro_batch_tokens)
            restored.restore(self._memory.read(path), gradient_error)
            return restored

        self._make, self._trainer = restore, None

    def close(self) -> None:
        """Free the trainer and delete its file."""
        self._closed = True
        self._memory.remove(self)
        self._discard_file()

    def _discard_file(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None
