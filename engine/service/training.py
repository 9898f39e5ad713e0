"""Training model: its request queue, and the work of each type of request."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TypeVar

from tinker.types import AdamParams

from engine.checkpoints.checkpoint import ADAPTER, OPTIMIZER, Checkpoint, SaveMetadata
from engine.checkpoints.external import external_files
from engine.checkpoints.names import CheckpointName, Kind, check_name, parse_path
from engine.checkpoints.runs import RunStore, TrainingRun
from engine.checkpoints.store import CheckpointStore, pack
from engine.compute.base import BaseModel
from engine.compute.lora import Adapter, LoraSpec
from engine.compute.loss import Loss
from engine.compute.trainer import Trainer
from engine.errors import LostStateError, RequestError
from engine.memory.budget import MemoryBudget
from engine.memory.trainer_store import TrainerStore
from engine.service.futures import WireResponse
from engine.service.history import ModelHistory, ModelJournal
from engine.service.ordered_queue import OrderedQueue, QueueServices
from engine.service.origin import Origin
from engine.service.worker import Worker
from engine.wire.forward_backward import ForwardBackward, decode_data, encode_output

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TrainingServices:
    """Services shared by all training models.

    Attributes:
        max_pass_tokens: returns the maximum size of a forward pass of a model in tokens.
        check_session: raises an EngineError if the session with an id has ended, or its client is gone.
        max_request_s: maximum compute time of a pass.
    """

    find_base: Callable[[str], BaseModel]
    find_loss: Callable[[str, ForwardBackward], Loss]
    worker: Worker
    queues: QueueServices
    checkpoints: CheckpointStore
    runs: RunStore
    memory: MemoryBudget
    max_pass_tokens: Callable[[BaseModel], int]
    check_session: Callable[[str], None]
    max_request_s: float


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """Checkpoint to write.

    Attributes:
        recipients: public keys of the encryption program `age`; only their owners can read external weights.
    """

    kind: Kind
    name: str | None
    overwrite: bool
    ttl_seconds: int | None
    user_metadata: dict[str, str]
    recipients: Sequence[str] = ()


class TrainingModel:
    """Model of the Tinker protocol. Its queue calls its methods one at a time, in seq order."""

    def __init__(self, model_id: str, services: TrainingServices, journal: ModelJournal) -> None:
        self.model_id = model_id
        self.queue = OrderedQueue(model_id, services.queues, journal)
        self.last_request = datetime.now(UTC)
        self._services = services
        self._session_id = model_id.partition(":")[0]  # the models of a session share their compute time
        self._journal = journal
        self._origin: Origin | None = None
        self._trainer_store: TrainerStore | None = None
        self._lost_message: str | None = None

    @property
    def origin(self) -> Origin:
        """State that the model was created from, or last loaded from or saved to.

        Raises:
            RequestError: the model is not created yet, or its creation failed.
        """
        if self._origin is None:
            raise self._not_created()
        return self._origin

    def restore(self, history: ModelHistory) -> None:
        """Restore the model of a killed engine. If training since its origin is lost, requests fail until a `load`."""
        self._origin = history.origin
        if history.origin is None or history.origin_is_current:
            self._trainer_store = self._new_store(history.origin) if history.origin else None
            lost = f"The engine was restarted before this request of {self.model_id} ran: send it again."
        else:
            saved = [c for c in self._services.checkpoints.list_run(self.model_id) if c.name.kind == "weights"]
            advice = (
                f"its last checkpoint is {saved[-1].name.path}: create a training client from it, with its optimizer."
                if saved
                else "it has no checkpoint: create a new training client."
            )
            self._lost_message = lost = (
                f"The engine was restarted, and recent training of {self.model_id} is lost; {advice}"
            )
            # A fresh adapter, into which `load` can load a checkpoint.
            self._trainer_store = self._new_store(replace(history.origin, path=None))
        applied = (
            f"The engine was restarted before the result of this request of {self.model_id} was fetched; its effect "
            "on the model is saved: do not send it again."
        )
        self.queue.restore(history, WireResponse.failure(applied, "server"), WireResponse.failure(lost, "server"))

    def close(self) -> None:
        """Drop waiting requests and free the weights."""
        self.queue.close()
        if self._trainer_store is not None:
            self._trainer_store.close()

    async def create(self, base_model: str, spec: LoraSpec, user_metadata: dict[str, str]) -> WireResponse:
        await self._start(Origin(base_model, spec), user_metadata)
        return WireResponse.json({"model_id": self.model_id, "type": "create_model"})

    async def create_from(
        self, path: str, with_optimizer: bool, base_model: str | None, user_metadata: dict[str, str]
    ) -> WireResponse:
        checkpoint = self._services.checkpoints.find(parse_path(path))
        origin = Origin.from_checkpoint(checkpoint, base_model or checkpoint.base_model, with_optimizer)
        await self._start(origin, user_metadata)
        return self._loaded_response(path)

    async def load(self, path: str, with_optimizer: bool) -> WireResponse:
        checkpoint = self._services.checkpoints.find(parse_path(path))
        origin = Origin.from_checkpoint(checkpoint, self.origin.base_model, with_optimizer)
        lost_message, self._lost_message = self._lost_message, None
        try:
            await self._run(lambda trainer: origin.load_into(trainer, self._services.checkpoints))
        except BaseException:
            self._lost_message = lost_message
            raise
        self._record_origin(origin)
        return self._loaded_response(path)

    async def forward_backward(self, request: ForwardBackward) -> WireResponse:
        def compute(trainer: Trainer) -> Generator[None, None, bytes]:
            loss = self._services.find_loss(self.model_id, request)
            data_D = decode_data(request.data, loss.inputs)
            output = yield from trainer.forward_backward(data_D, loss, request.forward_only)
            use = "forwarded" if request.forward_only else "trained"
            self._services.queues.metrics.count_tokens(use, sum(len(datum.tokens_T) for datum in data_D))
            return encode_output(output.logprobs_D, output.metrics)

        try:
            return WireResponse(await self._run_generator(compute))
        except Exception as error:
            if not request.forward_only:
                reason = f"request {request.seq_id}: {error}"
                await self._run(lambda trainer: trainer.invalidate_gradient(reason))
            raise

    async def optim_step(self, params: AdamParams) -> WireResponse:
        norm = await self._run(lambda trainer: trainer.optim_step(params))
        # The hosted service, too, reports the norm under this name, and only if the gradient may be clipped.
        return WireResponse.json({"metrics": {} if norm is None else {"unclipped_grad_l2:mean": norm}})

    async def save(self, request: SaveRequest) -> WireResponse:
        name = CheckpointName(self.model_id, request.kind, check_name(request.name))
        base_model = self.origin.base_model

        def write(trainer: Trainer) -> tuple[Checkpoint, bool]:
            metadata = SaveMetadata(base_model, trainer.adapter.spec, request.ttl_seconds, request.user_metadata)
            files = self._files(trainer, request)
            checkpoint = self._services.checkpoints.save(name, metadata, files, request.overwrite)
            return checkpoint, trainer.is_between_steps

        # With an accumulated gradient, the checkpoint is not the whole state of the model.
        checkpoint, is_complete = await self._run(write)
        if request.kind == "weights" and is_complete:
            self._record_origin(Origin.from_checkpoint(checkpoint, base_model, with_optimizer=True))
        return WireResponse.json({"path": checkpoint.name.path, "size_bytes": checkpoint.num_bytes})

    async def snapshot(self) -> tuple[str, Adapter]:
        """Return the base model's name and a copy of the current adapter.

        Raises:
            RequestError: the model is not created yet, or its creation failed.
            LostStateError: the weights were lost when the engine restarted.
        """
        return self.origin.base_model, await self._run(lambda trainer: trainer.snapshot())

    async def _start(self, origin: Origin, user_metadata: dict[str, str]) -> None:
        store = self._new_store(origin)

        def create_and_record() -> None:
            store.trainer()
            self._services.runs.save(
                TrainingRun(self.model_id, origin.base_model, origin.lora, datetime.now(UTC), user_metadata)
            )

        self._services.find_base(origin.base_model)
        await self._services.worker.run(create_and_record, self._session_id)
        self._trainer_store = store
        self._record_origin(origin)

    async def _run(self, function: Callable[[Trainer], Result]) -> Result:
        store = self._usable_store()
        return await self._services.worker.run(lambda: function(store.trainer()), self._session_id)

    async def _run_generator(self, function: Callable[[Trainer], Generator[None, None, Result]]) -> Result:
        store = self._usable_store()

        def run() -> Generator[None, None, Result]:
            return (yield from function(store.trainer()))

        return await self._services.worker.run_generator(run(), self._session_id, self._check_running)

    def _check_running(self, seconds: float) -> None:
        """Raise an EngineError if the running pass has computed for too long, or nobody waits for it."""
        self._services.check_session(self._session_id)
        if seconds > (limit := self._services.max_request_s):
            raise RequestError(
                f"The request has computed for {seconds:.0f} s, and the limit is {limit:g} s: send smaller batches."
            )

    def _usable_store(self) -> TrainerStore:
        if self._lost_message is not None:
            raise LostStateError(self._lost_message)
        if self._trainer_store is None:
            raise self._not_created()
        return self._trainer_store

    def _not_created(self) -> RequestError:
        return RequestError(
            f"The model {self.model_id} is not created: wait for the result of its first request, or create a new "
            "model if that request failed."
        )

    def _record_origin(self, origin: Origin) -> None:
        """Record the current state's origin. A restart restores it, unless later requests change the state."""
        self._origin = origin
        assert self.queue.running is not None
        self._journal.record_origin(self.queue.running, origin)

    def _new_store(self, origin: Origin) -> TrainerStore:
        def make() -> Trainer:
            base = self._services.find_base(origin.base_model)
            pass_tokens = self._services.max_pass_tokens(base)
            return origin.make_trainer(base, self._services.checkpoints, pass_tokens)

        return TrainerStore(make, self._services.memory, lambda: self.queue.running is not None)

    def _files(self, trainer: Trainer, request: SaveRequest) -> dict[str, bytes]:
        if request.kind == "external_weights":
            weights = trainer.external_weights()
            return external_files(weights, trainer.adapter.spec, self.origin.base_model, request.recipients)
        files = {ADAPTER: pack(trainer.weights())}
        if request.kind == "weights":
            files[OPTIMIZER] = pack(trainer.optimizer_state())
        return files

    def _loaded_response(self, path: str) -> WireResponse:
        return WireResponse.json({"path": path, "model_id": self.model_id, "type": "load_weights"})
