"""The engine's state: which sessions, models and samplers there are."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.names import parse_path
from engine.checkpoints.runs import RunStore
from engine.checkpoints.store import CheckpointStore
from engine.compute.base import BaseModel
from engine.compute.loss import Loss, bind_loss
from engine.errors import EngineError, NotThereError, RequestError
from engine.hub_files import hub_names
from engine.listen import is_loopback
from engine.models import LoadedModel
from engine.service.adapter_home import AdapterHome
from engine.service.clock import Clock
from engine.service.custom_losses import CustomLosses
from engine.service.futures import Futures
from engine.service.history import Notes, SessionHistory
from engine.service.journal import Journal
from engine.service.links import Links
from engine.service.memory import Memory
from engine.service.metrics import Metrics
from engine.service.ordered import QueueServices
from engine.service.samplers import Sampler
from engine.service.sampling_queue import SamplingQueue
from engine.service.sessions import FinishReason, Session, SessionStore, SessionSummary
from engine.service.settings import Settings
from engine.service.training import TrainingModel, Workshop
from engine.service.worker import Worker
from engine.wire.forward_backward import ForwardBackward

log = logging.getLogger(__name__)

SILENCE_S = 600.0  # a client that was not heard of for so long is gone


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
        self.custom_losses = CustomLosses(settings.state)
        self.checkpoints.sweep()
        self.memory = Memory(settings.memory_limit_bytes, settings.state / "evicted")
        self.metrics = Metrics(self.gauges)
        self.clock = Clock(settings.clock_cycle_s)
        self.sessions: dict[str, Session] = {}
        self.session_store = SessionStore(settings.state)
        self._by_other_name = {
            name: base for base in bases.values() for name in (str(base.loaded.path), *hub_names(base.loaded))
        }
        self._sampling = {id(base): SamplingQueue(base, self.worker, settings) for base in bases.values()}
        self._shop = Workshop(
            find_base=self.base,
            find_loss=self._find_loss,
            worker=self.worker,
            queues=QueueServices(self.futures, self.clock, self.metrics, settings.max_waiting_requests),
            checkpoints=self.checkpoints,
            runs=self.runs,
            memory=self.memory,
            micro_batch_tokens=settings.micro_batch_tokens,
        )
        for history, journal in self.session_store.unfinished():
            self._restore(history, journal)

    def base(self, name: str) -> BaseModel:
        """The base model called ``name``, by its own name, an alias or its directory.

        Raises:
            RequestError: this engine does not serve it.
        """
        base = self.bases.get(name) or self._by_other_name.get(name)
        if base is None:
            raise RequestError(
                f"This engine does not serve the model {name!r}; it serves {', '.join(self.bases)}: "
                "ask for one of these, or start the engine with --model."
            )
        return base

    def tokenizer_name(self, loaded: LoadedModel) -> str:
        """The name to load the model's tokenizer by: its directory, which clients on this machine find offline, or
        the model's own name, which others find here by HF_ENDPOINT."""
        return str(loaded.path) if is_loopback(self.settings.host) else loaded.name

    def _find_loss(self, model_id: str, request: ForwardBackward) -> Loss:
        """The loss that a request names; a custom one is of the model's own session."""
        if request.loss_fn == "custom":
            return self.custom_losses.find(model_id.partition(":")[0], request.config.get("loss_id"))
        return bind_loss(request.loss_fn, request.config)

    def open_session(self, user_metadata: dict[str, str], display_name: str | None) -> Session:
        """Raises a RequestError where there are as many as there may be."""
        self._close_silent_sessions()
        if len(self.sessions) >= self.settings.max_sessions:
            raise RequestError(
                f"The engine has {len(self.sessions)} sessions, and no more than {self.settings.max_sessions} may be: "
                "close a service client that is no longer needed."
            )
        session = self.session_store.open(user_metadata, display_name)
        self.sessions[session.session_id] = session
        return session

    def summary(self, session_id: str) -> SessionSummary:
        """What is known of a session, living or finished; raises a NotThereError for one that never was."""
        if (session := self.sessions.get(session_id)) is not None:
            return session.summary()
        if (finished := self.session_store.finished.get(session_id)) is not None:
            return finished
        raise NotThereError(f"There is no session {session_id} in this engine's state folder.")

    def summaries(self) -> list[SessionSummary]:
        """All sessions, newest first."""
        found = [*self.session_store.finished.values(), *(session.summary() for session in self.sessions.values())]
        return sorted(found, key=lambda summary: (summary.created_at, summary.session_id), reverse=True)

    def _close_silent_sessions(self) -> None:
        """Clients that were killed finish no session; whoever comes next frees what they held."""
        now = time.monotonic()
        for session in [s for s in self.sessions.values() if now - s.last_heard > SILENCE_S]:
            self.close_session(session.session_id, "interrupted", "its client was not heard of any more")

    def session(self, session_id: str) -> Session:
        """Raises a NotThereError for a session that ended, or that another run of the engine opened."""
        if (session := self.sessions.get(session_id)) is None:
            raise NotThereError(
                f"The engine has no session {session_id}: it was finished, or the engine was restarted "
                "since; create a new service client."
            )
        session.last_heard = time.monotonic()
        return session

    def close_session(self, session_id: str, reason: FinishReason, detail: str | None) -> None:
        """Free what a session holds; its checkpoints stay."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        for model in session.models.values():
            model.close()
        for sampler in session.samplers.values():
            sampler.close()
        self.futures.forget(f"{session_id}:")
        self.custom_losses.forget(session_id)
        self.session_store.finish(session, reason, detail)

    def new_model(self, session_id: str, model_seq_id: int) -> TrainingModel:
        """The model number ``model_seq_id`` of a session; a repeat gets the same one.

        Raises:
            RequestError: there are as many as there may be.
        """
        session = self.session(session_id)
        model_id = f"{session_id}:train:{model_seq_id}"
        if model_id not in session.models:
            if sum(len(s.models) for s in self.sessions.values()) >= self.settings.max_models:
                raise RequestError(
                    f"The engine has {self.settings.max_models} models in training, as many as there may be: "
                    "close a service client that is no longer needed."
                )
            session.models[model_id] = TrainingModel(model_id, self._shop, Notes(session.journal, model_id))
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
        if sampler_id not in session.samplers:
            session.samplers[sampler_id] = self._sampler(sampler_id, name, checkpoint)
            session.journal.append({"type": "sampler", "sampler": sampler_id, "base": name, "path": model_path})
        return session.samplers[sampler_id]

    async def new_snapshot_sampler(self, model: TrainingModel, seq_id: int) -> Sampler:
        """A sampler of a model as it is now."""
        session = self.session(model.model_id.partition(":")[0])
        base_name, adapter = await model.snapshot()
        sampler_id = f"{session.session_id}:sample:{seq_id}"
        queue = self._sampling[id(self.base(base_name))]
        home = await self.worker.run(lambda: AdapterHome.of_snapshot(self.memory, queue.base, adapter), sampler_id)
        return session.samplers.setdefault(sampler_id, Sampler(sampler_id, base_name, queue, None, home))

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

    def lost_sample(self, request_id: str) -> bool:
        """Whether it is a request to a living sampler whose result is no longer here: it can be asked again."""
        sampler_id = request_id.rpartition(":")[0]
        session = self.sessions.get(request_id.partition(":")[0])
        return session is not None and sampler_id in session.samplers

    def stop(self) -> None:
        """Finish what runs; the sessions go on when an engine is started on the same state."""
        self.worker.stop()
        self.memory.close()

    def _restore(self, history: SessionHistory, journal: Journal) -> None:
        """Go on with a session that an earlier run of the engine had."""
        session = Session(history.session_id, history.created_at, history.user_metadata, history.display_name, journal)
        self.sessions[session.session_id] = session
        for model_id, known in history.models.items():
            model = TrainingModel(model_id, self._shop, Notes(journal, model_id))
            model.restore(known)
            session.models[model_id] = model
        for sampler_id, (base_name, path) in history.samplers.items():
            try:
                checkpoint = self.checkpoints.find(parse_path(path)) if path else None
                session.samplers[sampler_id] = self._sampler(sampler_id, base_name, checkpoint)
            except EngineError as error:
                log.warning("The sampler %s is gone: %s", sampler_id, error)

    def _sampler(self, sampler_id: str, base_name: str, checkpoint: Checkpoint | None) -> Sampler:
        queue = self._sampling[id(self.base(base_name))]
        if checkpoint is None:
            return Sampler(sampler_id, base_name, queue, None, None)
        home = AdapterHome.of_checkpoint(self.memory, queue.base, self.checkpoints, checkpoint)
        return Sampler(sampler_id, base_name, queue, checkpoint.name.path, home)

    def gauges(self) -> Mapping[str, float]:
        """The present values that `metrics.GAUGES` describes."""
        models = [model for session in self.sessions.values() for model in session.models.values()]
        return {
            "sessions": len(self.sessions),
            "models": len(models),
            "samplers": sum(len(session.samplers) for session in self.sessions.values()),
            "waiting_requests": sum(model.queue.num_waiting for model in models),
            "running_requests": sum(model.queue.running is not None for model in models),
            "adapter_bytes": self.memory.num_bytes,
            "evictions": self.memory.num_evictions,
            "busy_seconds": self.worker.busy_s,
            "resident_bytes": _resident_bytes(),
        }


def _resident_bytes() -> int:
    """Memory of this process, as Linux tells it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
