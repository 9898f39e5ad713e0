"""Checkpoints in the state folder: the adapter under peft's tensor names, the optimizer moments beside it.

``runs/<run>/<kind>/<name>.json`` describes a checkpoint and names the folder that holds its tensors. That
file appears last, by one atomic rename, so a checkpoint is there as a whole or not at all, also when it
replaces another of the same name.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import safetensors.torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from engine.checkpoints.files import disk_errors, flush_folder, replace_json, write_durably
from engine.checkpoints.names import KINDS, CheckpointName, run_folder
from engine.compute.lora import LoraSpec
from engine.errors import EngineError, NotThereError, RequestError

log = logging.getLogger(__name__)

ADAPTER = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"


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
    """

    name: CheckpointName
    base_model: str
    lora: LoraSpec
    folder: str
    files: Mapping[str, StoredFile]
    created_at: datetime
    expires_at: datetime | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)

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


_CHECKPOINT = TypeAdapter(Checkpoint)


class CheckpointStore:
    """All checkpoints under one state folder; several engines may share it."""

    def __init__(self, state: Path) -> None:
        self._runs = state / "runs"

    def save(
        self,
        name: CheckpointName,
        description: Description,
        files: Mapping[str, Mapping[str, Tensor]],
        overwrite: bool,
    ) -> Checkpoint:
        """Write ``files`` (tensors by name, per file name) as the checkpoint ``name``.

        Raises:
            RequestError: it exists and ``overwrite`` is off.
            EngineError: the disk refused; the checkpoint that was there before still is.
        """
        target = self._description_path(name)
        if target.exists() and not overwrite:
            raise RequestError(f"The checkpoint {name.path} exists: save under another name, or with overwrite=True.")
        before = self._read(target) if target.exists() else None
        now = datetime.now(UTC)
        folder = f"{name.name}@{uuid.uuid4().hex}"
        with disk_errors(f"The checkpoint {name.path}"):
            try:
                checkpoint = Checkpoint(
                    name=name,
                    base_model=description.base_model,
                    lora=description.lora,
                    folder=folder,
                    files=_write_files(target.parent / folder, files),
                    created_at=now,
                    expires_at=now + timedelta(seconds=description.ttl_seconds) if description.ttl_seconds else None,
                    user_metadata=description.user_metadata,
                )
                replace_json(target, _CHECKPOINT.dump_python(checkpoint, mode="json"))
            except BaseException:
                shutil.rmtree(target.parent / folder, ignore_errors=True)
                raise
        if before is not None:
            shutil.rmtree(target.parent / before.folder, ignore_errors=True)
        return checkpoint

    def find(self, name: CheckpointName) -> Checkpoint:
        """The description of ``name``.

        Raises:
            NotThereError: there is no such checkpoint, or it has expired.
        """
        path = self._description_path(name)
        if not path.is_file():
            raise NotThereError(
                f"There is no checkpoint {name.path} in this engine's state folder: "
                "check the path, and that the engine was started on the folder it was saved in."
            )
        checkpoint = self._read(path)
        if checkpoint.expires_at is not None and checkpoint.expires_at < datetime.now(UTC):
            self.delete(name)
            raise NotThereError(f"The checkpoint {name.path} expired on {checkpoint.expires_at:%Y-%m-%d %H:%M} UTC.")
        return checkpoint

    def read(self, checkpoint: Checkpoint, file: str) -> dict[str, Tensor]:
        """The tensors of one file, checked against the checksum of the save.

        Raises:
            RequestError: the checkpoint has no such file.
            EngineError: the file is damaged.
        """
        stored = checkpoint.files.get(file)
        if stored is None:
            raise RequestError(
                f"The checkpoint {checkpoint.name.path} has no optimizer state: load it without, "
                "or load one that save_state wrote."
            )
        path = self._description_path(checkpoint.name).parent / checkpoint.folder / file
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != stored.sha256:
            raise EngineError(
                f"The checkpoint {checkpoint.name.path} is damaged: the {len(content)} bytes of {file} are not "
                f"the {stored.num_bytes} bytes that were saved; load the checkpoint before it."
            )
        return safetensors.torch.load(content)

    def of_run(self, run: str) -> list[Checkpoint]:
        """The checkpoints of a training run, oldest first."""
        folder = self._runs / run_folder(run)
        found = [checkpoint for kind in KINDS for checkpoint in self._readable(folder / kind)]
        now = datetime.now(UTC)
        living = [checkpoint for checkpoint in found if checkpoint.expires_at is None or checkpoint.expires_at > now]
        return sorted(living, key=lambda checkpoint: checkpoint.created_at)

    def delete(self, name: CheckpointName) -> None:
        """Remove a checkpoint: first its description, so that it is never half there.

        Raises:
            NotThereError: there is none.
        """
        path = self._description_path(name)
        if not path.is_file():
            raise NotThereError(f"There is no checkpoint {name.path} in this engine's state folder.")
        folder = path.parent / self._read(path).folder
        path.unlink()
        shutil.rmtree(folder, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what saves left behind that were killed half-way, an hour ago or more."""
        for kind in KINDS:
            for kind_folder in self._runs.glob(f"*/{kind}"):
                in_use = {checkpoint.folder for checkpoint in self._readable(kind_folder)}
                damaged = len(in_use) < len(list(kind_folder.glob("[!.]*.json")))
                for folder in kind_folder.glob("*@*/"):
                    stale = folder.name not in in_use and time.time() - folder.stat().st_mtime > 3600
                    if stale and not damaged:
                        shutil.rmtree(folder, ignore_errors=True)

    def _description_path(self, name: CheckpointName) -> Path:
        return self._runs / run_folder(name.run) / name.kind / f"{name.name}.json"

    def _readable(self, kind_folder: Path) -> Iterator[Checkpoint]:
        for path in kind_folder.glob("[!.]*.json"):
            try:
                yield self._read(path)
            except EngineError as error:
                log.warning("%s", error)

    def _read(self, path: Path) -> Checkpoint:
        try:
            return _CHECKPOINT.validate_json(path.read_bytes())
        except ValidationError as error:
            raise EngineError(
                f"The checkpoint description {path} is damaged: load the checkpoint before it."
            ) from error


def _write_files(folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, StoredFile]:
    folder.mkdir(parents=True)
    stored = {}
    for name, tensors in files.items():
        content = safetensors.torch.save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
        stored[name] = StoredFile(len(content), write_durably(folder / name, content))
    flush_folder(folder)
    return stored
