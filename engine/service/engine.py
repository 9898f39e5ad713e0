"""The engine's state: which sessions, models and samplers there are."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime

from engine.checkpoints.names import parse_path
from engine.checkpoints.runs import RunStore
from engine.checkpoints.store import CheckpointStore
from engine.compute.base import BaseModel
from engine.compute.loss import Loss, bind_loss
from engine.errors import NotThereError, RequestError
from engine.service.futures import Futures
from engine.service.links import Links
from engine.service.samplers import Sampler
from engine.service.sampling_queue import SamplingQueue
from engine.service.settings import Settings
from engine.service.training import TrainingModel, Workshop
from engine.service.worker import Worker
from engine.wire.forward_backward import ForwardBackward

SILENCE_S = 600.0  # a client that was not heard of for so long is gone


@dataclass(slots=True)
class Session:
    """One client: the models and samplers it made live and end with it.

    Attributes:
        last_heard: monotonic seconds; its client sends a heartbeat every 10 s.
    """

    session_id: str
    user_metadata: dict[str, str]
    display_name: str | None
    last_heard: float = field(default_factory=time.monotonic)
    models: dict[str, TrainingModel] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)


class Engine:
    """Everything a request can reach. Its methods run on the event loop; torch runs on the worker."""

    def __init__(self, settings: Settings, bases: dict[str, BaseModel]) -> None:
        """Args:
        bases: the loaded models by the name they were asked for.
        """
        self.settings = settings
        self.bases = bases
        self.futures = Futures()
        self.worker = Worker()
        self.links = Links()
        self.checkpoints = CheckpointStore(settings.state)
        self.runs = RunStore(settings.state)
        self.checkpoints.sweep()
        self.sessions: dict[str, Session] = {}
        self._by_path = {str(base.loaded.path): base for base in bases.values()}
        self._sampling = {id(base): SamplingQueue(base, self.worker, settings) for base in bases.values()}
        self._shop = Workshop(
            find_base=self.base,
            find_loss=self._find_loss,
            worker=self.worker,
            futures=self.futures,
            checkpoints=self.checkpoints,
            runs=self.runs,
            micro_batch_tokens=settings.micro_batch_tokens,
        )

    def base(self, name: str) -> BaseModel:
        """The base model called ``name``, or in the directory ``name``.

        Raises:
            RequestError: this engine does not serve it.
        """
        base = self.bases.get(name) or self._by_path.get(name)
        if base is None:
            raise RequestError(
                f"This engine does not serve the model {name!r}; it serves {', '.join(self.bases)}: "
                "ask for one of these, or start the engine with --model."
            )
        return base

    def _find_loss(self, model_id: str, request: ForwardBackward) -> Loss:
        """The loss that a request names."""
        return bind_loss(request.loss_fn, request.config)

    def open_session(self, user_metadata: dict[str, str], display_name: str | None) -> Session:
        self._close_silent_sessions()
        # Unique across engines and restarts: model ids and folders on disk derive from it.
        session = Session(str(uuid.uuid4()), user_metadata, display_name)
        self.sessions[session.session_id] = session
        return session

    def _close_silent_sessions(self) -> None:
        """Clients that were killed finish no session; whoever comes next frees what they held."""
        now = time.monotonic()
        for session in [s for s in self.sessions.values() if now - s.last_heard > SILENCE_S]:
            self.close_session(session.session_id)

    def session(self, session_id: str) -> Session:
        """Raises a NotThereError for a session that ended, or that another run of the engine opened."""
        if (session := self.sessions.get(session_id)) is None:
            raise NotThereError(
                f"The engine has no session {session_id}: it was finished, or the engine was restarted "
                "since; create a new service client."
            )
        session.last_heard = time.monotonic()
        return session

    def close_session(self, session_id: str) -> None:
        """Free what a session holds; its checkpoints stay."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        for model in session.models.values():
            model.queue.close()
        for sampler in session.samplers.values():
            sampler.close()
        self.futures.forget(f"{session_id}:")

    def new_model(self, session_id: str, model_seq_id: int) -> TrainingModel:
        """The model number ``model_seq_id`` of a session; a repeat gets the same one."""
        session = self.session(session_id)
        model_id = f"{session_id}:train:{model_seq_id}"
        if model_id not in session.models:
            session.models[model_id] = TrainingModel(model_id, self._shop)
        return session.models[model_id]

    def model(self, model_id: str) -> TrainingModel:
        """Raises a NotThereError for a model this run of the engine does not hold."""
        session = self.sessions.get(model_id.partition(":")[0])
        model = session.models.get(model_id) if session else None
        if model is None:
            raise NotThereError(
                f"The engine holds no model {model_id}: its session ended or the engine was restarted since; "
                "create a training client from the last checkpoint."
            )
        model.last_request = datetime.now(UTC)
        return model

    def new_sampler(self, session_id: str, seq_id: int, base_model: str | None, model_path: str | None) -> Sampler:
        """A sampler of a checkpoint, or of a base model."""
        session = self.session(session_id)
        checkpoint = self.checkpoints.find(parse_path(model_path)) if model_path else None
        name = checkpoint.base_model if checkpoint else base_model
        if name is None:
            raise RequestError("A sampling session needs a base_model or a model_path.")
        sampler_id = f"{session_id}:sample:{seq_id}"
        queue = self._sampling[id(self.base(name))]
        sampler = Sampler(sampler_id, name, queue, self.checkpoints, checkpoint)
        return session.samplers.setdefault(sampler_id, sampler)

    async def new_snapshot_sampler(self, model: TrainingModel, seq_id: int) -> Sampler:
        """A sampler of a model as it is now."""
        session = self.session(model.model_id.partition(":")[0])
        base_name, adapter = await model.snapshot()
        sampler_id = f"{session.session_id}:sample:{seq_id}"
        sampler = Sampler(sampler_id, base_name, self._sampling[id(self.base(base_name))], self.checkpoints, None)
        sampler.adapter = adapter
        return session.samplers.setdefault(sampler_id, sampler)

    def sampler(self, sampler_id: str) -> Sampler:
        """Raises a NotThereError for a sampler this run of the engine does not hold."""
        session = self.sessions.get(sampler_id.partition(":")[0])
        sampler = session.samplers.get(sampler_id) if session else None
        if sampler is None:
            raise NotThereError(
                f"The engine has no sampler {sampler_id}: its session ended or the engine was restarted "
                "since; create a new sampling client."
            )
        return sampler
