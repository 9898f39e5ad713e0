"""One model in training: its queue, and what each kind of request does to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from tinker.types import AdamParams

from engine.checkpoints.checkpoint import ADAPTER, OPTIMIZER, Checkpoint, Description
from engine.checkpoints.external import external_files
from engine.checkpoints.names import CheckpointName, Kind, check_name, parse_path
from engine.checkpoints.runs import RunStore, TrainingRun
from engine.checkpoints.store import CheckpointStore, pack
from engine.compute.base import BaseModel
from engine.compute.lora import Adapter, LoraSpec
from engine.compute.loss import Loss
from engine.compute.trainer import Trainer
from engine.errors import RequestError
from engine.service.futures import Answer, Futures
from engine.service.ordered import OrderedQueue
from engine.service.worker import Result, Worker
from engine.wire.forward_backward import ForwardBackward, decode_datum, encode_output


@dataclass(frozen=True, slots=True)
class Workshop:
    """What all models share."""

    find_base: Callable[[str], BaseModel]
    find_loss: Callable[[str, ForwardBackward], Loss]
    worker: Worker
    futures: Futures
    checkpoints: CheckpointStore
    runs: RunStore
    micro_batch_tokens: int


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A checkpoint to be written: which kind, under what name, and what to note in it.

    Attributes:
        recipients: whom external weights are encrypted to.
    """

    kind: Kind
    name: str | None
    overwrite: bool
    ttl_seconds: int | None
    user_metadata: dict[str, str]
    recipients: Sequence[str] = ()


class TrainingModel:
    """A model id of the protocol. Its methods are the work of its queue: one at a time, in seq order."""

    def __init__(self, model_id: str, shop: Workshop) -> None:
        self.model_id = model_id
        self.queue = OrderedQueue(model_id, shop.futures)
        self.last_request = datetime.now(UTC)
        self._shop = shop
        self._trainer: Trainer | None = None
        self._base_name = ""

    @property
    def trainer(self) -> Trainer:
        """Raises a RequestError until the model is created."""
        if self._trainer is None:
            raise RequestError(
                f"The model {self.model_id} was never created: its first request failed; create a new one."
            )
        return self._trainer

    @property
    def base_name(self) -> str:
        return self._base_name

    async def create(self, base_model: str, spec: LoraSpec, user_metadata: dict[str, str]) -> Answer:
        base = self._shop.find_base(base_model)
        await self._start(base_model, lambda: self._new_trainer(base, spec), user_metadata)
        return Answer.json({"model_id": self.model_id, "type": "create_model"})

    async def create_from(
        self, path: str, with_optimizer: bool, base_model: str | None, user_metadata: dict[str, str]
    ) -> Answer:
        checkpoint = self._shop.checkpoints.find(parse_path(path))
        base_name = base_model or checkpoint.base_model
        base = self._shop.find_base(base_name)

        def make() -> Trainer:
            trainer = self._new_trainer(base, checkpoint.lora)
            self._read_into(trainer, checkpoint, with_optimizer)
            return trainer

        await self._start(base_name, make, user_metadata)
        return self._loaded(path)

    async def load(self, path: str, with_optimizer: bool) -> Answer:
        checkpoint = self._shop.checkpoints.find(parse_path(path))
        trainer = self.trainer
        await self._run(lambda: self._read_into(trainer, checkpoint, with_optimizer))
        return self._loaded(path)

    async def forward_backward(self, request: ForwardBackward) -> Answer:
        trainer = self.trainer

        def compute() -> bytes:
            loss = self._shop.find_loss(self.model_id, request)
            data_D = [decode_datum(message, index, loss.inputs) for index, message in enumerate(request.data)]
            output = trainer.forward_backward(data_D, loss, request.forward_only)
            return encode_output(output.logprobs_D, output.metrics)

        try:
            return Answer(await self._run(compute))
        except Exception as error:
            if not request.forward_only:
                trainer.lose_batch(f"request {request.seq_id}: {error}")
            raise

    async def optim_step(self, params: AdamParams) -> Answer:
        trainer = self.trainer
        await self._run(lambda: trainer.optim_step(params))
        return Answer.json({"metrics": {}})

    async def save(self, request: SaveRequest) -> Answer:
        trainer = self.trainer
        name = CheckpointName(self.model_id, request.kind, check_name(request.name))
        description = Description(self._base_name, trainer.adapter.spec, request.ttl_seconds, request.user_metadata)

        def write() -> Checkpoint:
            return self._shop.checkpoints.save(name, description, self._files(trainer, request), request.overwrite)

        checkpoint = await self._run(write)
        return Answer.json({"path": checkpoint.name.path, "size_bytes": checkpoint.num_bytes})

    async def snapshot(self) -> tuple[str, Adapter]:
        """The base model's name and a copy of the adapter as it is now."""
        trainer = self.trainer
        return self._base_name, await self._run(trainer.snapshot)

    async def _start(self, base_name: str, make: Callable[[], Trainer], user_metadata: dict[str, str]) -> None:
        def make_and_note() -> Trainer:
            trainer = make()
            run = TrainingRun(self.model_id, base_name, trainer.adapter.spec, datetime.now(UTC), user_metadata)
            self._shop.runs.save(run)
            return trainer

        self._trainer = await self._run(make_and_note)
        self._base_name = base_name

    async def _run(self, function: Callable[[], Result]) -> Result:
        return await self._shop.worker.run(function, self.model_id)

    def _new_trainer(self, base: BaseModel, spec: LoraSpec) -> Trainer:
        return Trainer(base, spec, self._shop.micro_batch_tokens)

    def _files(self, trainer: Trainer, request: SaveRequest) -> dict[str, bytes]:
        if request.kind == "external_weights":
            return external_files(trainer.weights(), trainer.adapter.spec, self._base_name, request.recipients)
        files = {ADAPTER: pack(trainer.weights())}
        if request.kind == "weights":
            files[OPTIMIZER] = pack(trainer.optimizer_state())
        return files

    def _read_into(self, trainer: Trainer, checkpoint: Checkpoint, with_optimizer: bool) -> None:
        store = self._shop.checkpoints
        weights = store.read(checkpoint, ADAPTER)
        trainer.load(weights, store.read(checkpoint, OPTIMIZER) if with_optimizer else None)

    def _loaded(self, path: str) -> Answer:
        return Answer.json({"path": path, "model_id": self.model_id, "type": "load_weights"})
