"""From what a model's weights can be made again, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from engine.checkpoints.checkpoint import ADAPTER, OPTIMIZER, Checkpoint
from engine.checkpoints.names import parse_path
from engine.checkpoints.store import CheckpointStore
from engine.compute.base import BaseModel
from engine.compute.lora import LoraSpec
from engine.compute.trainer import Trainer
from engine.errors import RequestError


@dataclass(frozen=True, slots=True)
class Origin:
    """A fresh adapter of a seed, or a checkpoint.

    Attributes:
        base_model: by the name clients use.
        lora: the adapter's shape and seed.
        path: of the checkpoint; None is the fresh adapter.
        folder: where the checkpoint lay, to notice another one under the same name.
        with_optimizer: whether the moments belong to it.
    """

    base_model: str
    lora: LoraSpec
    path: str | None = None
    folder: str | None = None
    with_optimizer: bool = False

    @staticmethod
    def of(checkpoint: Checkpoint, base_model: str, with_optimizer: bool) -> Origin:
        return Origin(base_model, checkpoint.lora, checkpoint.name.path, checkpoint.folder, with_optimizer)

    def make(self, base: BaseModel, store: CheckpointStore, micro_batch_tokens: int) -> Trainer:
        """The trainer as it was there.

        Raises:
            RequestError: the checkpoint was deleted or replaced since.
            EngineError: it is damaged, or does not fit the base model.
        """
        trainer = Trainer(base, self.lora, micro_batch_tokens)
        self.read_into(trainer, store)
        return trainer

    def read_into(self, trainer: Trainer, store: CheckpointStore) -> None:
        """Give ``trainer`` the checkpoint's weights, and its moments if they belong to it."""
        if self.path is None:
            return
        checkpoint = store.find(parse_path(self.path))
        if checkpoint.folder != self.folder:
            raise RequestError(f"{self.path} was replaced since this model was in its state: load it again.")
        weights = store.read(checkpoint, ADAPTER)
        trainer.load(weights, store.read(checkpoint, OPTIMIZER) if self.with_optimizer else None)

    def to_json(self) -> dict[str, Any]:
        return _ORIGIN.dump_python(self, mode="json")

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Origin:
        return _ORIGIN.validate_python(content)


_ORIGIN = TypeAdapter(Origin)
