"""Checkpoints in the state folder: the adapter under peft's tensor names, the optimizer moments beside it.

``runs/<run>/<kind>/<name>.json`` describes a checkpoint and names the folder that holds its tensors. That
file appears last, by one atomic rename, so a checkpoint is there as a whole or not at all, also when it
replaces another of the same name.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors.torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from engine.checkpoints.checkpoint import ADAPTER, OPTIMIZER, Checkpoint, Description, StoredFile, expiry
from engine.checkpoints.files import disk_errors, flush_folder, replace_json, write_durably
from engine.checkpoints.names import KINDS, CheckpointName, run_folder
from engine.errors import EngineError, NotThereError, RequestError

log = logging.getLogger(__name__)

_CHECKPOINT = TypeAdapter(Checkpoint)
_CALLED = {OPTIMIZER: "optimizer state", ADAPTER: "readable weights"}


class CheckpointStore:
    """All checkpoints under one state folder; several engines may share it."""

    def __init__(self, state: Path) -> None:
        self._runs = state / "runs"
        self._lock = threading.RLock()  # descriptions change on the compute thread and on those of REST requests

    def save(
        self,
        name: CheckpointName,
        description: Description,
        files: Mapping[str, bytes],
        overwrite: bool,
    ) -> Checkpoint:
        """Write ``files`` as the checkpoint ``name``; the tensors among them as `pack` packs them.

        Raises:
            RequestError: it exists and ``overwrite`` is off, or its time to live is out of range.
            EngineError: the disk refused; the checkpoint that was there before still is.
        """
        target = self._description_path(name)
        if not overwrite and target.exists() and not self._read(target).expired:
            raise RequestError(f"The checkpoint {name.path} exists: save under another name, or with overwrite=True.")
        now = datetime.now(UTC)
        expires_at = expiry(now, description.ttl_seconds)
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
                    expires_at=expires_at,
                    user_metadata=description.user_metadata,
                )
                with self._lock:
                    before = self._read(target) if target.exists() else None
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
        try:
            checkpoint = self._read(self._description_path(name))
        except FileNotFoundError as error:
            raise NotThereError(
                f"There is no checkpoint {name.path} in this engine's state folder: "
                "check the path, and that the engine was started on the folder it was saved in."
            ) from error
        if checkpoint.expires_at is not None and checkpoint.expired:
            self._remove(checkpoint)
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
                f"The checkpoint {checkpoint.name.path} has no {_CALLED.get(file, file)}: load it without, "
                "or load one that save_state wrote."
            )
        path = self.file_path(checkpoint, file)
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
        living = []
        for checkpoint in [checkpoint for kind in KINDS for checkpoint in self._readable(folder / kind)]:
            if checkpoint.expired:
                self._remove(checkpoint)
            else:
                living.append(checkpoint)
        return sorted(living, key=lambda checkpoint: checkpoint.created_at)

    def set_ttl(self, name: CheckpointName, ttl_seconds: int | None) -> None:
        """Let a checkpoint expire ``ttl_seconds`` from now, or never.

        Raises:
            NotThereError: there is none.
            RequestError: less than a second, or more than ten years.
        """
        self._change(name, expires_at=expiry(datetime.now(UTC), ttl_seconds))

    def set_public(self, name: CheckpointName, public: bool) -> None:
        """Note whether a checkpoint is published.

        Raises:
            NotThereError: there is none.
        """
        self._change(name, public=public)

    def delete(self, name: CheckpointName) -> None:
        """Remove a checkpoint: first its description, so that it is never half there.

        Raises:
            NotThereError: there is none.
        """
        self._remove(self.find(name))

    def file_path(self, checkpoint: Checkpoint, file: str) -> Path:
        """Where ``file``, one of ``checkpoint.files``, lies."""
        return self._description_path(checkpoint.name).parent / checkpoint.folder / file

    def sweep(self) -> None:
        """Remove what has expired, and what saves left behind that were killed half-way an hour ago or more."""
        for kind in KINDS:
            for kind_folder in self._runs.glob(f"*/{kind}"):
                for checkpoint in self._readable(kind_folder):
                    if checkpoint.expired:
                        self._remove(checkpoint)
                in_use = {checkpoint.folder for checkpoint in self._readable(kind_folder)}
                damaged = len(in_use) < len(list(kind_folder.glob("[!.]*.json")))
                for folder in kind_folder.glob("*@*/"):
                    stale = folder.name not in in_use and time.time() - folder.stat().st_mtime > 3600
                    if stale and not damaged:
                        shutil.rmtree(folder, ignore_errors=True)

    def _change(self, name: CheckpointName, **changes: Any) -> None:
        with self._lock, disk_errors(f"The description of {name.path}"):
            changed = replace(self.find(name), **changes)
            replace_json(self._description_path(name), _CHECKPOINT.dump_python(changed, mode="json"))

    def _remove(self, checkpoint: Checkpoint) -> None:
        path = self._description_path(checkpoint.name)
        with self._lock:
            if path.is_file() and self._read(path).folder == checkpoint.folder:
                path.unlink()
        shutil.rmtree(path.parent / checkpoint.folder, ignore_errors=True)

    def _description_path(self, name: CheckpointName) -> Path:
        return self._runs / run_folder(name.run) / name.kind / f"{name.name}.json"

    def _readable(self, kind_folder: Path) -> Iterator[Checkpoint]:
        for path in kind_folder.glob("[!.]*.json"):
            try:
                yield self._read(path)
            except FileNotFoundError:
                continue  # deleted meanwhile
            except EngineError as error:
                log.warning("%s", error)

    def _read(self, path: Path) -> Checkpoint:
        try:
            return _CHECKPOINT.validate_json(path.read_bytes())
        except ValidationError as error:
            raise EngineError(
                f"The checkpoint description {path} is damaged: load the checkpoint before it."
            ) from error


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as a safetensors file, which can hold nothing that runs."""
    return safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def _write_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, StoredFile]:
    folder.mkdir(parents=True)
    stored = {name: StoredFile(len(content), write_durably(folder / name, content)) for name, content in files.items()}
    flush_folder(folder)
    return stored
