"""What is known of a checkpoint without reading its tensors."""

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
    """What is known of a checkpoint without reading its tensors.

    Attributes:
        name: its three-part name.
        base_model: the model it adapts, by the name clients use.
        lora: the adapter's shape.
        folder: the folder beside its description that holds `files`.
        files: `ADAPTER`, and `OPTIMIZER` unless it is for sampling only.
        public: whether its owner published it; this engine serves every client alike.
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
class Description:
    """What a save is told about a checkpoint, besides its tensors."""

    base_model: str
    lora: LoraSpec
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)


def expiry(now: datetime, ttl_seconds: int | None) -> datetime | None:
    """When a checkpoint expires that is to live ``ttl_seconds`` from ``now``; None is never.

    Raises:
        RequestError: less than a second, or more than ten years.
    """
    if ttl_seconds is None:
        return None
    if not 1 <= ttl_seconds <= MAX_TTL_S:
        raise RequestError(f"ttl_seconds is {ttl_seconds}; give 1 to {MAX_TTL_S} seconds, or nothing for no end.")
    return now + timedelta(seconds=ttl_seconds)
