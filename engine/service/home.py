"""Where one model's trainer is: in memory, on disk, or still to be made from where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.compute.trainer import Trainer
from engine.service.memory import Memory


class Home:
    """Makes the trainer when it is first needed, and again after it had to leave memory. For the compute thread."""

    def __init__(self, make: Callable[[], Trainer], memory: Memory, is_busy: Callable[[], bool]) -> None:
        """Args:
        make: the trainer in its first state.
        is_busy: whether a request is at work on it.
        """
        self._make = make
        self._memory = memory
        self._is_busy = is_busy
        self._trainer: Trainer | None = None
        self._file: Path | None = None
        self._closed = False

    def trainer(self) -> Trainer:
        if self._trainer is None:
            self._trainer = self._make()
            self._discard_file()
        if not self._closed:
            self._memory.used(self)
        return self._trainer

    @property
    def num_bytes(self) -> int:
        return 0 if self._trainer is None else self._trainer.num_bytes

    @property
    def is_busy(self) -> bool:
        return self._is_busy()

    def leave(self) -> None:
        trainer = self._trainer
        assert trainer is not None
        path = self._file = self._memory.write(trainer.tensors())
        base, spec, lost = trainer.base, trainer.adapter.spec, trainer.lost
        micro_batch_tokens = trainer.micro_batch_tokens

        def make() -> Trainer:
            again = Trainer(base, spec, micro_batch_tokens)
            again.restore(self._memory.read(path), lost)
            return again

        self._make, self._trainer = make, None

    def close(self) -> None:
        """The model is gone."""
        self._closed = True
        self._memory.forget(self)
        self._discard_file()

    def _discard_file(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None
