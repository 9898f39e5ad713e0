"""State of the engine: its sessions, training models and samplers."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.names import parse_path
from engine.checkpoints.runs import RunStore
from engine.checkpoints.store import CheckpointStore
from engine.compute.base import BaseModel
from engine.compute.loss import Loss, bind_loss
from engine.errors import EngineError, NotFoundError, RequestError
from engine.hub_files import hub_names
from engine.listen import is_loopback
from engine.memory.adapter_store import AdapterStore
from engine.memory.budget import MemoryBudget
from engine.memory.capacity import max_adapter_bytes, max_pass_tokens
from engine.models import LoadedModel
from engine.service.custom_losses import CustomLossStore
from engine.service.futures import Futures
from engine.service.history import ModelJournal, SessionHistory
from engine.service.journal import Journal
from engine.service.metrics import Metrics
from engine.service.ordered_queue import Clock, QueueServices
from engine.service.samplers import Sampler
from engine.service.sampling_queue import SamplingQueue
from engine.service.sessions import FinishReason, Session, SessionStore, SessionSummary
from engine.service.settings import Settings
from engine.service.training import TrainingModel, TrainingServices
from engine.service.worker import Worker
from engine.wire.forward_backward import ForwardBackward

log = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 600.0  # a session without any request for this long is closed


class Engine:
    """Sessions, models, samplers and stores of the engine, which the request handlers use.

    Methods run on the event loop; torch runs on the worker's thread.
    """

    def __init__(self, settings: Settings, bases: dict[str, BaseModel], worker: Worker) -> None:
        """Open the state folder and restore the unfinished sessions.

        Args:
            bases: loaded models by the names in `settings.models`.
            worker: the thread that loaded them.
        """
        self.settings = settings
        self.bases = bases
        self.futures = Futures()
        self.worker = worker
        self.checkpoints = CheckpointStore(settings.state)
        self.runs = RunStore(settings.state)
        self.custom_losses = CustomLossStore(settings.state)
        self.checkpoints.remove_stale()
        weight_bytes = sum(base.num_bytes for base in bases.values())
        adapter_bytes = max_adapter_bytes(settings, next(iter(bases.values())), weight_bytes)
        self.memory = MemoryBudget(adapter_bytes, settings.state / "evicted")
        self.metrics = Metrics(self.gauges)
        self.clock = Clock(settings.clock_cycle_s)
        self.sessions: dict[str, Session] = {}
        self.session_store = SessionStore(settings.state, settings.part)
        self._base_aliases = {
            name: base for base in bases.values() for name in (str(base.loaded.path), *hub_names(base.loaded))
        }
        self._sampling_queues = {
            id(base): SamplingQueue(base, self.worker, settings, weight_bytes) for base in bases.values()
        }
        self._training_services = TrainingServices(
            find_base=self.base,
            find_loss=self._find_loss,
            worker=self.worker,
            queues=QueueServices(self.futures, self.clock, self.metrics, settings.max_waiting_requests),
            checkpoints=self.checkpoints,
            runs=self.runs,
            memory=self.memory,
            max_pass_tokens=partial(max_pass_tokens, settings, weight_bytes=weight_bytes),
            check_session=self._check_session,
            max_request_s=settings.max_request_s,
        )
        for history, journal in self.session_store.unfinished():
            self._restore(history, journal)

    def base(self, name: str) -> BaseModel:
        """Return a base model by its name, an alias or its directory.

        Raises:
            RequestError: this engine does not serve the model.
        """
        base = self.bases.get(name) or self._base_aliases.get(name)
        if base is None:
            raise RequestError(
                f"This engine does not serve the model {name!r}; it serves {', '.join(self.bases)}: "
                "request one of these, or start the engine with another --model."
            )
        return base

    def tokenizer_name(self, loaded: LoadedModel) -> str:
        """Return the name by which clients load the model's tokenizer.

        Clients on this machine use the model's directory, which works offline. Other clients use the model's name,
        which the engine serves as a hub (HF_ENDPOINT).
        """
        return str(loaded.path) if is_loopback(self.settings.host) else loaded.name

    def _find_loss(self, model_id: str, request: ForwardBackward) -> Loss:
        """Find the loss of a request; custom losses belong to the model's session."""
        if request.loss_fn == "custom":
            return self.custom_losses.find(model_id.partition(":")[0], request.config.get("loss_id"))
        return bind_loss(request.loss_fn, request.config)

    def open_session(self, user_metadata: dict[str, str], display_name: str | None) -> Session:
        """Open a session; raises a RequestError if the engine has the maximum number of sessions."""
        self.close_idle_sessions()
        if len(self.sessions) >= self.settings.max_sessions:
            raise RequestError(
                f"The engine already has its maximum of {self.settings.max_sessions} sessions: "
                "close service clients that are no longer needed."
            )
        session = self.session_store.open(user_metadata, display_name)
        self.sessions[session.session_id] = session
        return session

    def summary(self, session_id: str) -> SessionSummary:
        """Return the summary of an open or finished session; raises a NotFoundError if it never existed."""
        if (session := self.sessions.get(session_id)) is not None:
            return session.summary()
        if (finished := self.session_store.finished.get(session_id)) is not None:
            return finished
        raise NotFoundError(f"There is no session {session_id} in this engine's state folder: check its id.")

    def summaries(self) -> list[SessionSummary]:
        """List the summaries of all sessions, newest first."""
        summaries = [*self.session_store.finished.values(), *(session.summary() for session in self.sessions.values())]
        return sorted(summaries, key=lambda summary: (summary.created_at, summary.session_id), reverse=True)

    def close_idle_sessions(self) -> None:
        """Close the sessions of killed clients, which never finish their sessions themselves."""
        now = time.monotonic()
        for session in [s for s in self.sessions.values() if now - s.last_seen > CLIENT_TIMEOUT_S]:
            self.close_session(session.session_id, "interrupted", "the client stopped sending requests")

    def _check_session(self, session_id: str) -> None:
        """Close idle sessions; raise a NotFoundError if ``session_id`` is not open."""
        self.close_idle_sessions()
        if session_id not in self.sessions:
            raise NotFoundError(f"The session {session_id} has ended, so its running request was cancelled.")

    def session(self, session_id: str) -> Session:
        """Return an open session; raises a NotFoundError if there is none."""
        if (session := self.sessions.get(session_id)) is None:
            raise NotFoundError(
                f"The engine has no open session {session_id}: it was finished, was closed after {CLIENT_TIMEOUT_S:g} "
                "s without requests, or belongs to another state folder; create a new service client."
            )
        session.last_seen = time.monotonic()
        self.close_idle_sessions()
        return session

    def keep_alive(self, owned_id: str) -> None:
        """Note that the client that owns a model, a sampler or a request is alive."""
        if (session := self.sessions.get(owned_id.partition(":")[0])) is not None:
            session.last_seen = time.monotonic()

    def close_session(self, session_id: str, reason: FinishReason, detail: str | None) -> None:
        """Close a session and free its models and samplers; its checkpoints remain."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        for model in session.models.values():
            model.close()
        for sampler in session.samplers.values():
            sampler.close()
        self.futures.drop(f"{session_id}:")
        self.custom_losses.delete_session(session_id)
        self.session_store.finish(session, reason, detail)

    def new_model(self, session_id: str, model_seq_id: int) -> TrainingModel:
        """Return the model ``model_seq_id`` of a session, created on the first call.

        Raises:
            NotFoundError: the session is not open.
            RequestError: the engine has the maximum number of models.
        """
        session = self.session(session_id)
        model_id = f"{session_id}:train:{model_seq_id}"
        if model_id not in session.models:
            if sum(len(s.models) for s in self.sessions.values()) >= self.settings.max_models:
                raise RequestError(
                    f"The engine already has its maximum of {self.settings.max_models} models in training: "
                    "close service clients that are no longer needed."
                )
            journal = ModelJournal(session.journal, model_id)
            session.models[model_id] = TrainingModel(model_id, self._training_services, journal)
        return session.models[model_id]

    def model(self, model_id: str) -> TrainingModel:
        """Return a model of an open session; raises a NotFoundError if there is none."""
        session = self.sessions.get(model_id.partition(":")[0])
        model = session.models.get(model_id) if session else None
        if model is None:
            raise NotFoundError(
                f"The engine has no model {model_id}: its session was finished, was closed after {CLIENT_TIMEOUT_S:g} "
                "s without requests, or belongs to another state folder; create a training client from the last "
                "checkpoint."
            )
        model.last_request = datetime.now(UTC)
        self.keep_alive(model_id)
        return model

    def new_sampler(self, session_id: str, seq_id: int, base_model: str | None, model_path: str | None) -> Sampler:
        """Return sampler ``seq_id`` of a session, created on the first call for a checkpoint or a base model.

        Raises:
            NotFoundError: the session is not open, or the checkpoint does not exist.
            RequestError: neither a checkpoint nor a base model is given, the checkpoint's path is invalid, or this
                engine does not serve the base model.
        """
        session = self.session(session_id)
        checkpoint = self.checkpoints.find(parse_path(model_path)) if model_path else None
        name = checkpoint.base_model if checkpoint else base_model
        if name is None:
            raise RequestError("A sampling session needs a base_model or a model_path: send one of them.")
        sampler_id = f"{session_id}:sample:{seq_id}"
        if sampler_id not in session.samplers:
            session.samplers[sampler_id] = self._create_sampler(sampler_id, name, checkpoint)
            folder = checkpoint.folder if checkpoint else None
            session.journal.append(
                {"type": "sampler", "sampler": sampler_id, "base": name, "path": model_path, "folder": folder}
            )
        return session.samplers[sampler_id]

    async def new_snapshot_sampler(self, model: TrainingModel, seq_id: int) -> Sampler:
        """Create sampler ``seq_id`` of the model's session, for the current weights of the model.

        Raises:
            NotFoundError: the session is not open.
            RequestError, LostStateError: see `TrainingModel.snapshot`.
        """
        session = self.session(model.model_id.partition(":")[0])
        base_name, adapter = await model.snapshot()
        sampler_id = f"{session.session_id}:sample:{seq_id}"
        queue = self._sampling_queues[id(self.base(base_name))]
        adapter_store = await self.worker.run(
            lambda: AdapterStore.from_snapshot(self.memory, queue.base, adapter), session.session_id
        )
        return session.samplers.setdefault(sampler_id, Sampler(sampler_id, base_name, queue, None, adapter_store))

    def sampler(self, sampler_id: str) -> Sampler:
        """Return a sampler of an open session; raises a NotFoundError if there is none."""
        session = self.sessions.get(sampler_id.partition(":")[0])
        sampler = session.samplers.get(sampler_id) if session else None
        if sampler is None:
            raise NotFoundError(
                f"The engine has no sampler {sampler_id}: its session ended, or the engine was restarted; "
                "create a new sampling client."
            )
        self.keep_alive(sampler_id)
        return sampler

    def can_resample(self, request_id: str) -> bool:
        """Return whether the sampler of a lost request still exists, so that the client can sample again."""
        sampler_id = request_id.rpartition(":")[0]
        session = self.sessions.get(request_id.partition(":")[0])
        return session is not None and sampler_id in session.samplers

    def stop(self) -> None:
        """Finish the running work. An engine started on the same state continues the sessions."""
        self.worker.stop()
        self.memory.close()

    def _restore(self, history: SessionHistory, journal: Journal) -> None:
        """Continue an unfinished session of an earlier engine process."""
        session = Session(history.session_id, history.created_at, history.user_metadata, history.display_name, journal)
        self.sessions[session.session_id] = session
        for model_id, model_history in history.models.items():
            model = TrainingModel(model_id, self._training_services, ModelJournal(journal, model_id))
            model.restore(model_history)
            session.models[model_id] = model
        for sampler_id, sampler in history.samplers.items():
            try:
                checkpoint = self.checkpoints.find(parse_path(sampler.path)) if sampler.path else None
                if checkpoint is not None and sampler.folder not in (None, checkpoint.folder):
                    raise RequestError(f"{sampler.path} was replaced after this sampler was created.")
                session.samplers[sampler_id] = self._create_sampler(sampler_id, sampler.base_model, checkpoint)
            except EngineError as error:
                log.warning("The sampler %s was not restored: %s", sampler_id, error)

    def _create_sampler(self, sampler_id: str, base_name: str, checkpoint: Checkpoint | None) -> Sampler:
        queue = self._sampling_queues[id(self.base(base_name))]
        if checkpoint is None:
            return Sampler(sampler_id, base_name, queue, None, None)
        adapter_store = AdapterStore.from_checkpoint(self.memory, queue.base, self.checkpoints, checkpoint)
        return Sampler(sampler_id, base_name, queue, checkpoint.name.path, adapter_store)

    def gauges(self) -> Mapping[str, float]:
        """Return the current values of `metrics.GAUGES`."""
        models = [model for session in self.sessions.values() for model in session.models.values()]
        queues = self._sampling_queues.values()
        return {
            "sessions": len(self.sessions),
            "models": len(models),
            "samplers": sum(len(session.samplers) for session in self.sessions.values()),
            "waiting_requests": sum(model.queue.num_waiting for model in models),
            "running_requests": sum(model.queue.running is not None for model in models),
            "adapter_bytes": self.memory.num_bytes,
            "evictions": self.memory.num_evictions,
            "prefill_tokens_requested": sum(queue.prefill_tokens_requested for queue in queues),
            "prefill_tokens_computed": sum(queue.prefill_tokens_computed for queue in queues),
            "busy_seconds": self.worker.busy_s,
            "resident_bytes": _resident_bytes(),
        }


def _resident_bytes() -> int:
    """Resident memory of this process, read from Linux's /proc."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
