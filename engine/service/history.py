"""History of a session: records written to its journal, and read back after a restart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from engine.service.futures import WireResponse
from engine.service.journal import Journal, Record
from engine.service.origin import Origin


@dataclass(slots=True)
class ModelHistory:
    """Past requests of one model.

    Attributes:
        digests: digests of all accepted requests, by seq id.
        responses: responses in JSON, by seq id.
        origin: the last reproducible state; `origin_seq_id` is the request that created it.
        last_change: seq id of the last request that changes the state.
    """

    digests: dict[int, bytes] = field(default_factory=dict)
    responses: dict[int, WireResponse] = field(default_factory=dict)
    origin: Origin | None = None
    origin_seq_id: int = -1
    last_change: int = -1

    @property
    def origin_is_current(self) -> bool:
        """True if no later request changed the state of `origin`."""
        return self.origin is not None and self.last_change <= self.origin_seq_id


@dataclass(frozen=True, slots=True)
class SamplerHistory:
    """Weights of one sampler.

    Attributes:
        path: path of the checkpoint; None is the base model.
        folder: folder of the checkpoint at the creation of the sampler; another save of the checkpoint has another
            folder. None for the base model, and in old journals.
    """

    base_model: str
    path: str | None
    folder: str | None


@dataclass(slots=True)
class SessionHistory:
    """Session, as recorded by its journal."""

    session_id: str
    created_at: datetime
    user_metadata: dict[str, str]
    display_name: str | None
    models: dict[str, ModelHistory] = field(default_factory=dict)
    samplers: dict[str, SamplerHistory] = field(default_factory=dict)

    @staticmethod
    def from_records(records: Iterable[Record]) -> SessionHistory:
        """Read the records of a journal; the first record describes the session itself."""
        first, *others = records
        history = SessionHistory(
            first["session_id"],
            datetime.fromisoformat(first["created_at"]),
            first["user_metadata"],
            first["display_name"],
        )
        for record in others:
            history._add(record)
        return history

    def _add(self, record: Record) -> None:
        if record["type"] == "sampler":
            self.samplers[record["sampler"]] = SamplerHistory(record["base"], record["path"], record.get("folder"))
            return
        model = self.models.setdefault(record["model"], ModelHistory())
        seq_id = record["seq"]
        if record["type"] == "request":
            model.digests[seq_id] = bytes.fromhex(record["digest"])
            if record["changes"]:
                model.last_change = max(model.last_change, seq_id)
        elif record["type"] == "answer":
            failed = record.get("failed", False)
            model.responses[seq_id] = WireResponse(record["body"].encode(), "application/json", failed)
        else:
            model.origin, model.origin_seq_id = Origin.from_json(record["origin"]), seq_id


class ModelJournal:
    """Writes the records of one model to its session's journal."""

    def __init__(self, journal: Journal, model_id: str) -> None:
        self._journal = journal
        self._model_id = model_id

    def record_request(self, seq_id: int, digest: bytes, changes: bool) -> None:
        self._append("request", seq_id, digest=digest.hex(), changes=changes)

    def record_response(self, seq_id: int, response: WireResponse) -> None:
        """Record a response in JSON; skip the results of passes, which are protobuf (`engine.service.journal`)."""
        if response.media_type == "application/json":
            self._append("answer", seq_id, body=response.body.decode(), failed=response.failed)

    def record_origin(self, seq_id: int, origin: Origin) -> None:
        self._append("origin", seq_id, origin=origin.to_json())

    def _append(self, kind: str, seq_id: int, **content: object) -> None:
        self._journal.append({"type": kind, "model": self._model_id, "seq": seq_id, **content})
