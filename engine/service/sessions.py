"""Sessions of clients, open and finished, and their files."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

from pydantic import TypeAdapter, ValidationError

from engine.checkpoints.files import disk_errors
from engine.part import ALONE, Part
from engine.service.history import SessionHistory
from engine.service.journal import Journal
from engine.service.samplers import Sampler
from engine.service.training import TrainingModel

log = logging.getLogger(__name__)

FinishReason = Literal["success", "errored", "interrupted"]
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)


@dataclass(slots=True)
class Session:
    """Open session with its models and samplers.

    Attributes:
        last_seen: monotonic seconds of the last request; the client sends a heartbeat every 10 s.
    """

    session_id: str
    created_at: datetime
    user_metadata: dict[str, str]
    display_name: str | None
    journal: Journal
    last_seen: float = field(default_factory=time.monotonic)
    models: dict[str, TrainingModel] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)

    def summary(self, reason: FinishReason | None = None, detail: str | None = None) -> SessionSummary:
        return SessionSummary(
            self.session_id,
            self.created_at,
            self.user_metadata,
            self.display_name,
            tuple(self.models),
            tuple(self.samplers),
            reason,
            detail,
        )


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """Public description of an open or finished session.

    Attributes:
        reason: why the session ended; None while it is open.
    """

    session_id: str
    created_at: datetime
    user_metadata: Mapping[str, str]
    display_name: str | None
    run_ids: tuple[str, ...]
    sampler_ids: tuple[str, ...]
    reason: FinishReason | None = None
    detail: str | None = None


_SUMMARY = TypeAdapter(SessionSummary)


class SessionStore:
    """Sessions on disk: journals of open sessions and summaries of finished sessions.

    Attributes:
        finished: summaries by session id.
    """

    def __init__(self, state: Path, part: Part = ALONE) -> None:
        """Read the summaries of the finished sessions.

        Args:
            part: place of the engine among several engines that share the folder; it opens and restores its sessions.
        """
        self._part = part
        self._folder = state / "sessions"
        self._folder.mkdir(parents=True, exist_ok=True)
        self.finished: dict[str, SessionSummary] = {}
        for path in self._folder.glob("*.json"):
            try:
                self.finished[path.stem] = _SUMMARY.validate_json(path.read_bytes())
            except ValidationError:
                log.warning("The summary %s of a finished session is damaged: the session is not listed", path)

    def open(self, user_metadata: dict[str, str], display_name: str | None) -> Session:
        """Open a session with a new id, from which the ids of its models and their folders derive."""
        session_id, now = str(uuid.uuid4()), datetime.now(UTC)
        while not self._part.owns(session_id):
            session_id = str(uuid.uuid4())
        with disk_errors("The session"):
            journal = Journal(self._journal_path(session_id))
        journal.append(
            {
                "type": "session",
                "session_id": session_id,
                "created_at": now.isoformat(),
                "user_metadata": user_metadata,
                "display_name": display_name,
            }
        )
        return Session(session_id, now, user_metadata, display_name, journal)

    def unfinished(self) -> Iterator[tuple[SessionHistory, Journal]]:
        """Yield the open sessions of killed engines, with their journals; skip sessions of other engines."""
        for path in sorted(self._folder.glob("*.jsonl")):
            if not self._part.owns(path.stem):
                continue
            try:
                journal = Journal(path)
            except BlockingIOError:
                continue
            try:
                records = journal.read()
                if records and path.stem not in self.finished:
                    yield SessionHistory.from_records(records), journal
                    continue
            except (ValueError, LookupError, TypeError, AttributeError):
                log.warning("The journal %s of a session is damaged: the session is not restored", path)
            journal.remove()

    def finish(self, session: Session, reason: FinishReason, detail: str | None) -> None:
        """Write the summary of a session, and remove its journal."""
        summary = session.summary(reason, detail)
        self.finished[session.session_id] = summary
        path = self._folder / f"{session.session_id}.json"
        temporary = path.with_name(f".{path.name}")
        try:
            temporary.write_bytes(_SUMMARY.dump_json(summary))
            temporary.replace(path)
        except (OSError, ValueError) as error:
            log.warning("The summary %s of a session could not be written: %s", path, error)
        session.journal.remove()

    def _journal_path(self, session_id: str) -> Path:
        return self._folder / f"{session_id}.jsonl"
