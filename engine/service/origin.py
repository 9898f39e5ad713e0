"""Reproducible origin of a model's weights: a fresh adapter or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """State from which a model's weights can be recreated exactly.

    Attributes:
        base_model: API name of the base model.
        lora: shape and seed of the adapter.
        path: path of the checkpoint; None is a fresh adapter.
        folder: folder of the checkpoint when the model was created; another save of the checkpoint has another folder.
        with_optimizer: True if the optimizer moments belong to the state.
    """

    base_model: str
    lora: LoraSpec
    path: str | None = None
    folder: str | None = None
    with_optimizer: bool = False

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint, base_model: str, with_optimizer: bool) -> Origin:
        return Origin(base_model, checkpoint.lora, checkpoint.name.path, checkpoint.folder, with_optimizer)

    def make_trainer(self, base: BaseModel, store: CheckpointStore, micro_batch_tokens: int) -> Trainer:
        """Create a trainer with the state of this origin.

        Raises:
            RequestError: the checkpoint was deleted or replaced.
            EngineError: the checkpoint is damaged, or does not fit the base model.
        """
        trainer = Trainer(base, self.lora, micro_batch_tokens)
        self.load_into(trainer, store)
        return trainer

    def load_into(self, trainer: Trainer, store: CheckpointStore) -> None:
        """Load the checkpoint's weights into ``trainer``, and the moments if they belong to the state.

        Raises: see `make_trainer`.
        """
        if self.path is None:
            return
        checkpoint = store.find(parse_path(self.path))
        if checkpoint.folder != self.folder:
            raise RequestError(f"{self.path} was replaced after this model was saved to it: load the new one.")
        weights = store.read(checkpoint, ADAPTER)
        trainer.load(weights, store.read(checkpoint, OPTIMIZER) if self.with_optimizer else None)

    def to_json(self) -> dict[str, object]:
        return _ORIGIN.dump_python(self, mode="json")

    @staticmethod
    def from_json(content: Mapping[str, object]) -> Origin:
        return _ORIGIN.validate_python(content)


_ORIGIN = TypeAdapter(Origin)
