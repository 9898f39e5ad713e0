"""A session as its journal tells it after a restart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from engine.service.futures import Answer
from engine.service.journal import Journal, Record
from engine.service.origin import Origin


@dataclass(slots=True)
class ModelHistory:
    """What was asked of one model.

    Attributes:
        digests: of every request that was accepted, by seq id.
        answers: of those that were answered in JSON.
        origin: the last state that can be made again, and the seq id of the request that made it.
        last_change: seq id of the last request that changes the state.
    """

    digests: dict[int, bytes] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    origin: Origin | None = None
    origin_seq_id: int = -1
    last_change: int = -1

    @property
    def is_whole(self) -> bool:
        """Whether nothing was asked since that `origin` does not hold."""
        return self.origin is not None and self.last_change <= self.origin_seq_id


@dataclass(slots=True)
class SessionHistory:
    """What is known of a session, living or finished."""

    session_id: str
    created_at: datetime
    user_metadata: dict[str, str]
    display_name: str | None
    models: dict[str, ModelHistory] = field(default_factory=dict)
    samplers: dict[str, tuple[str, str | None]] = field(default_factory=dict)

    @staticmethod
    def of(records: Iterable[Record]) -> SessionHistory:
        """Read the records of a journal; the first one is the session itself."""
        first, *others = records
        history = SessionHistory(
            first["session_id"],
            datetime.fromisoformat(first["created_at"]),
            first["user_metadata"],
            first["display_name"],
        )
        for record in others:
            history._note(record)
        return history

    def _note(self, record: Record) -> None:
        if record["type"] == "sampler":
            self.samplers[record["sampler"]] = (record["base"], record["path"])
            return
        model = self.models.setdefault(record["model"], ModelHistory())
        seq_id = record["seq"]
        if record["type"] == "request":
            model.digests[seq_id] = bytes.fromhex(record["digest"])
            if record["changes"]:
                model.last_change = max(model.last_change, seq_id)
        elif record["type"] == "answer":
            model.answers[seq_id] = Answer(record["body"].encode(), "application/json")
        else:
            model.origin, model.origin_seq_id = Origin.from_json(record["origin"]), seq_id


class Notes:
    """Writes down what happens to one model."""

    def __init__(self, journal: Journal, model_id: str) -> None:
        self._journal = journal
        self._model_id = model_id

    def request(self, seq_id: int, digest: bytes, changes: bool) -> None:
        self._append("request", seq_id, digest=digest.hex(), changes=changes)

    def answer(self, seq_id: int, answer: Answer) -> None:
        if answer.media_type == "application/json":
            self._append("answer", seq_id, body=answer.body.decode())

    def origin(self, seq_id: int, origin: Origin) -> None:
        self._append("origin", seq_id, origin=origin.to_json())

    def _append(self, kind: str, seq_id: int, **content: object) -> None:
        self._journal.append({"type": kind, "model": self._model_id, "seq": seq_id, **content})
