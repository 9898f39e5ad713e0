"""Metadata of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from engine.checkpoints.names import CheckpointName
from engine.compute.lora import LoraSpec
from engine.errors import RequestError

ADAPTER = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"
MAX_TTL_S = 10 * 366 * 24 * 3600


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Size in bytes and SHA-256 of one file of a checkpoint."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Metadata of a checkpoint, without its tensors.

    Attributes:
        name: its three-part name.
        base_model: API name of the base model.
        lora: shape of the adapter.
        folder: name of the folder with `files`, next to the JSON description.
        files: `ADAPTER`, and `OPTIMIZER` unless the checkpoint is for sampling only.
        public: True if the owner published it. The engine itself treats all clients alike.
    """

    name: CheckpointName
    base_model: str
    lora: LoraSpec
    folder: str
    files: Mapping[str, StoredFile]
    created_at: datetime
    expires_at: datetime | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    public: bool = False

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= datetime.now(UTC)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())


@dataclass(frozen=True, slots=True)
class SaveMetadata:
    """Metadata that the caller of a save provides."""

    base_model: str
    lora: LoraSpec
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)


def expiry_time(now: datetime, ttl_seconds: int | None) -> datetime | None:
    """Return the time ``ttl_seconds`` after ``now``, or None for no expiry.

    Raises:
        RequestError: ``ttl_seconds`` is below one second or above ten years.
    """
    if ttl_seconds is None:
        return None
    if not 1 <= ttl_seconds <= MAX_TTL_S:
        raise RequestError(f"ttl_seconds is {ttl_seconds}; use 1 to {MAX_TTL_S} seconds, or omit it for no expiry.")
    return now + timedelta(seconds=ttl_seconds)
