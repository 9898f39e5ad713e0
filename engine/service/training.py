"""One model in training: its queue, and what each kind of request does to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from engine.compute.parts import Parts, Result
from engine.compute.trainer import Trainer
from engine.errors import LostError, RequestError
from engine.service.futures import Answer
from engine.service.history import ModelHistory, Notes
from engine.service.home import Home
from engine.service.memory import Memory
from engine.service.ordered import OrderedQueue, QueueServices
from engine.service.origin import Origin
from engine.service.worker import Worker
from engine.wire.forward_backward import ForwardBackward, decode_datum, encode_output


@dataclass(frozen=True, slots=True)
class Workshop:
    """What all models share."""

    find_base: Callable[[str], BaseModel]
    find_loss: Callable[[str, ForwardBackward], Loss]
    worker: Worker
    queues: QueueServices
    checkpoints: CheckpointStore
    runs: RunStore
    memory: Memory
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

    def __init__(self, model_id: str, shop: Workshop, notes: Notes) -> None:
        self.model_id = model_id
        self.queue = OrderedQueue(model_id, shop.queues, notes)
        self.last_request = datetime.now(UTC)
        self._shop = shop
        self._notes = notes
        self._origin: Origin | None = None
        self._home: Home | None = None
        self._lost: str | None = None

    @property
    def origin(self) -> Origin:
        """What the model was made from, or last saved to; raises a RequestError until it is created."""
        if self._origin is None:
            raise self._never_created()
        return self._origin

    def restore(self, history: ModelHistory) -> None:
        """Be what the model was before the engine was killed; what no checkpoint holds is lost, and said to be."""
        self._origin = history.origin
        if history.origin is None or history.is_whole:
            self._home = self._new_home(history.origin) if history.origin else None
            sentence = f"The engine was restarted before this request of {self.model_id} was done: send it again."
        else:
            saved = [c for c in self._shop.checkpoints.of_run(self.model_id) if c.name.kind == "weights"]
            advice = (
                f"its last checkpoint is {saved[-1].name.path}: create a training client from it, with its optimizer."
                if saved
                else "it has no checkpoint: create a new training client."
            )
            self._lost = sentence = (
                f"The engine was restarted, and what was asked of {self.model_id} since is lost; {advice}"
            )
            self._home = self._new_home(replace(history.origin, path=None))
        held = (
            f"The engine was restarted before the result of this request of {self.model_id} was fetched; what it did "
            "to the model is kept: do not send it again."
        )
        self.queue.restore(history, Answer.failure(held, "server"), Answer.failure(sentence, "server"))

    def close(self) -> None:
        """The session is over: drop what has not started, and the weights."""
        self.queue.close()
        if self._home is not None:
            self._home.close()

    async def create(self, base_model: str, spec: LoraSpec, user_metadata: dict[str, str]) -> Answer:
        await self._start(Origin(base_model, spec), user_metadata)
        return Answer.json({"model_id": self.model_id, "type": "create_model"})

    async def create_from(
        self, path: str, with_optimizer: bool, base_model: str | None, user_metadata: dict[str, str]
    ) -> Answer:
        checkpoint = self._shop.checkpoints.find(parse_path(path))
        await self._start(Origin.of(checkpoint, base_model or checkpoint.base_model, with_optimizer), user_metadata)
        return self._loaded(path)

    async def load(self, path: str, with_optimizer: bool) -> Answer:
        checkpoint = self._shop.checkpoints.find(parse_path(path))
        origin = Origin.of(checkpoint, self.origin.base_model, with_optimizer)
        lost, self._lost = self._lost, None
        try:
            await self._run(lambda trainer: origin.read_into(trainer, self._shop.checkpoints))
        except BaseException:
            self._lost = lost
            raise
        self._note(origin)
        return self._loaded(path)

    async def forward_backward(self, request: ForwardBackward) -> Answer:
        def compute(trainer: Trainer) -> Parts[bytes]:
            loss = self._shop.find_loss(self.model_id, request)
            data_D = [decode_datum(message, index, loss.inputs) for index, message in enumerate(request.data)]
            output = yield from trainer.forward_backward(data_D, loss, request.forward_only)
            use = "forwarded" if request.forward_only else "trained"
            self._shop.queues.metrics.tokens(use, sum(len(datum.tokens_T) for datum in data_D))
            return encode_output(output.logprobs_D, output.metrics)

        try:
            return Answer(await self._run_parts(compute))
        except Exception as error:
            if not request.forward_only:
                reason = f"request {request.seq_id}: {error}"
                await self._run(lambda trainer: trainer.lose_batch(reason))
            raise

    async def optim_step(self, params: AdamParams) -> Answer:
        await self._run(lambda trainer: trainer.optim_step(params))
        return Answer.json({"metrics": {}})

    async def save(self, request: SaveRequest) -> Answer:
        name = CheckpointName(self.model_id, request.kind, check_name(request.name))
        base_model = self.origin.base_model

        def write(trainer: Trainer) -> tuple[Checkpoint, bool]:
            description = Description(base_model, trainer.adapter.spec, request.ttl_seconds, request.user_metadata)
            files = self._files(trainer, request)
            return self._shop.checkpoints.save(name, description, files, request.overwrite), trainer.is_settled

        checkpoint, holds_all = await self._run(write)
        if request.kind == "weights" and holds_all:
            self._note(Origin.of(checkpoint, base_model, with_optimizer=True))
        return Answer.json({"path": checkpoint.name.path, "size_bytes": checkpoint.num_bytes})

    async def snapshot(self) -> tuple[str, Adapter]:
        """The base model's name and a copy of the adapter as it is now."""
        return self.origin.base_model, await self._run(lambda trainer: trainer.snapshot())

    async def _start(self, origin: Origin, user_metadata: dict[str, str]) -> None:
        home = self._new_home(origin)

        def make_and_note() -> None:
            home.trainer()
            self._shop.runs.save(
                TrainingRun(self.model_id, origin.base_model, origin.lora, datetime.now(UTC), user_metadata)
            )

        self._shop.find_base(origin.base_model)
        await self._shop.worker.run(make_and_note, self.model_id)
        self._home = home
        self._note(origin)

    async def _run(self, function: Callable[[Trainer], Result]) -> Result:
        home = self._usable_home()
        return await self._shop.worker.run(lambda: function(home.trainer()), self.model_id)

    async def _run_parts(self, make: Callable[[Trainer], Parts[Result]]) -> Result:
        home = self._usable_home()

        def parts() -> Parts[Result]:
            return (yield from make(home.trainer()))

        return await self._shop.worker.run_parts(parts(), self.model_id)

    def _usable_home(self) -> Home:
        if self._lost is not None:
            raise LostError(self._lost)
        if self._home is None:
            raise self._never_created()
        return self._home

    def _never_created(self) -> RequestError:
        return RequestError(f"The model {self.model_id} was never created: its first request failed; create a new one.")

    def _note(self, origin: Origin) -> None:
        """After a restart the model can be this again, if nothing else is asked of it until then."""
        self._origin = origin
        assert self.queue.running is not None
        self._notes.origin(self.queue.running, origin)

    def _new_home(self, origin: Origin) -> Home:
        def make() -> Trainer:
            base = self._shop.find_base(origin.base_model)
            return origin.make(base, self._shop.checkpoints, self._shop.micro_batch_tokens)

        return Home(make, self._shop.memory, lambda: self.queue.running is not None)

    def _files(self, trainer: Trainer, request: SaveRequest) -> dict[str, bytes]:
        if request.kind == "external_weights":
            return external_files(trainer.weights(), trainer.adapter.spec, self.origin.base_model, request.recipients)
        files = {ADAPTER: pack(trainer.weights())}
        if request.kind == "weights":
            files[OPTIMIZER] = pack(trainer.optimizer_state())
        return files

    def _loaded(self, path: str) -> Answer:
        return Answer.json({"path": path, "model_id": self.model_id, "type": "load_weights"})
