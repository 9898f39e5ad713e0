"""Checkpoints in the state folder: the adapter under peft's tensor names, and the optimizer moments.

``runs/<run>/<kind>/<name>.json`` describes a checkpoint and names the folder with its tensors. The JSON file
is written last, by an atomic rename, so that a checkpoint is complete or absent, even if it replaces another
checkpoint of the same name.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors.torch
from filelock import FileLock
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from engine.checkpoints.checkpoint import ADAPTER, OPTIMIZER, Checkpoint, SaveMetadata, StoredFile, expiry_time
from engine.checkpoints.files import disk_errors, flush_folder, replace_json, write_durably
from engine.checkpoints.names import KINDS, CheckpointName, is_run, run_folder
from engine.errors import EngineError, NotFoundError, RequestError

log = logging.getLogger(__name__)

_CHECKPOINT = TypeAdapter(Checkpoint)
_MISSING = {
    OPTIMIZER: "no optimizer state: load only its weights, or load a checkpoint written by save_state.",
    # Weights exported with age recipients are stored only encrypted.
    ADAPTER: "no plain adapter weights: load a checkpoint written by save_state or save_weights_for_sampler.",
}


class CheckpointStore:
    """All checkpoints in one state folder; several engines may share the folder."""

    def __init__(self, state: Path) -> None:
        self._runs = state / "runs"
        # The threads of this engine, and other engines on the same folder, change descriptions. A change takes
        # milliseconds, hence the short poll. The lock is reentrant: `_change` calls `find`, which may call `_remove`.
        self._lock = FileLock(state / "runs.lock", poll_interval=0.005)

    def save(
        self,
        name: CheckpointName,
        metadata: SaveMetadata,
        files: Mapping[str, bytes],
        overwrite: bool,
    ) -> Checkpoint:
        """Write ``files`` as the checkpoint ``name``; `pack` serializes tensors.

        Raises:
            RequestError: the checkpoint exists and ``overwrite`` is off, or its time to live is out of range.
            EngineError: the write to disk failed, or the description of an existing checkpoint of the same name is
                damaged. The name then has its existing checkpoint, or the new one if only a flush failed.
        """
        target = self._description_path(name)
        if not overwrite and target.exists() and not self._read(target).expired:
            raise RequestError(f"The checkpoint {name.path} exists: save under another name, or with overwrite=True.")
        now = datetime.now(UTC)
        expires_at = expiry_time(now, metadata.ttl_seconds)
        folder = f"{name.name}@{uuid.uuid4().hex}"
        with disk_errors(f"The checkpoint {name.path}"):
            try:
                checkpoint = Checkpoint(
                    name=name,
                    base_model=metadata.base_model,
                    lora=metadata.lora,
                    folder=folder,
                    files=_write_files(target.parent / folder, files),
                    created_at=now,
                    expires_at=expires_at,
                    user_metadata=metadata.user_metadata,
                )
                with self._lock:
                    previous = self._read(target) if target.exists() else None
                    replace_json(target, _CHECKPOINT.dump_python(checkpoint, mode="json"))
            except BaseException:
                if not self._may_name(target, folder):  # it does if only the flush after the rename failed
                    shutil.rmtree(target.parent / folder, ignore_errors=True)
                raise
        if previous is not None:
            shutil.rmtree(target.parent / previous.folder, ignore_errors=True)
        return checkpoint

    def find(self, name: CheckpointName) -> Checkpoint:
        """Return the metadata of a checkpoint.

        Raises:
            NotFoundError: the checkpoint does not exist, or has expired.
            EngineError: its description is damaged.
        """
        try:
            checkpoint = self._read(self._description_path(name))
        except FileNotFoundError as error:
            raise NotFoundError(
                f"There is no checkpoint {name.path} in this engine's state folder: "
                "check the path, and the --state folder of the engine."
            ) from error
        if checkpoint.expires_at is not None and checkpoint.expired:
            self._remove(checkpoint)
            raise NotFoundError(
                f"The checkpoint {name.path} expired on {checkpoint.expires_at:%Y-%m-%d %H:%M} UTC: use another "
                "checkpoint, or save the weights again with a longer ttl_seconds."
            )
        return checkpoint

    def read(self, checkpoint: Checkpoint, file: str) -> dict[str, Tensor]:
        """Read the tensors of one file, `ADAPTER` or `OPTIMIZER`, and verify its checksum.

        Raises:
            NotFoundError: the checkpoint was replaced or deleted since `find`.
            RequestError: the checkpoint has no such file.
            EngineError: the file is damaged.
        """
        stored = checkpoint.files.get(file)
        if stored is None:
            raise RequestError(f"The checkpoint {checkpoint.name.path} has {_MISSING[file]}")
        try:
            content = self.file_path(checkpoint, file).read_bytes()
        except FileNotFoundError as error:
            if not self._may_name(self._description_path(checkpoint.name), checkpoint.folder):
                raise NotFoundError(
                    f"The weights of {checkpoint.name.path} were replaced or deleted after this client was created: "
                    "create a new client."
                ) from error
            content = b""
        if hashlib.sha256(content).hexdigest() != stored.sha256:
            raise EngineError(
                f"The checkpoint {checkpoint.name.path} is damaged: {file} has {len(content)} bytes that do not match "
                f"the {stored.num_bytes} saved bytes; load an earlier checkpoint."
            )
        return safetensors.torch.load(content)

    def list_run(self, run: str) -> list[Checkpoint]:
        """List the checkpoints of a training run, oldest first; remove expired ones. An invalid run id has none."""
        if not is_run(run):
            return []
        folder = self._runs / run_folder(run)
        current = []
        for checkpoint in [checkpoint for kind in KINDS for checkpoint in self._readable(folder / kind)]:
            if checkpoint.expired:
                self._remove(checkpoint)
            else:
                current.append(checkpoint)
        return sorted(current, key=lambda checkpoint: checkpoint.created_at)

    def set_ttl(self, name: CheckpointName, ttl_seconds: int | None) -> None:
        """Set the expiry of a checkpoint to ``ttl_seconds`` from now, or to never.

        Raises:
            NotFoundError: the checkpoint does not exist.
            RequestError: ``ttl_seconds`` is below one second or above ten years.
            EngineError: the write to disk failed, or the checkpoint's description is damaged.
        """
        self._change(name, expires_at=expiry_time(datetime.now(UTC), ttl_seconds))

    def set_public(self, name: CheckpointName, public: bool) -> None:
        """Record that a checkpoint is public or private.

        Raises:
            NotFoundError: the checkpoint does not exist.
            EngineError: the write to disk failed, or the checkpoint's description is damaged.
        """
        self._change(name, public=public)

    def delete(self, name: CheckpointName) -> None:
        """Delete a checkpoint, its description first, so that no partial checkpoint is visible.

        Raises:
            NotFoundError: the checkpoint does not exist.
            EngineError: the checkpoint's description is damaged.
        """
        self._remove(self.find(name))

    def file_path(self, checkpoint: Checkpoint, file: str) -> Path:
        """Return the path of ``file``, one of ``checkpoint.files``."""
        return self._description_path(checkpoint.name).parent / checkpoint.folder / file

    def remove_stale(self) -> None:
        """Remove expired checkpoints, and partial saves that are at least an hour old."""
        for kind in KINDS:
            for kind_folder in self._runs.glob(f"*/{kind}"):
                for checkpoint in self._readable(kind_folder):
                    if checkpoint.expired:
                        self._remove(checkpoint)
                in_use = {checkpoint.folder for checkpoint in self._readable(kind_folder)}
                # A damaged description may belong to any folder, so keep all folders.
                has_damaged = len(in_use) < len(list(kind_folder.glob("[!.]*.json")))
                for folder in kind_folder.glob("*@*/"):
                    is_stale = folder.name not in in_use and time.time() - folder.stat().st_mtime > 3600
                    if is_stale and not has_damaged:
                        shutil.rmtree(folder, ignore_errors=True)

    def _change(self, name: CheckpointName, **changes: Any) -> None:
        with disk_errors(f"The description of {name.path}"), self._lock:
            changed = replace(self.find(name), **changes)
            replace_json(self._description_path(name), _CHECKPOINT.dump_python(changed, mode="json"))

    def _remove(self, checkpoint: Checkpoint) -> None:
        path = self._description_path(checkpoint.name)
        with self._lock:
            if path.is_file() and self._read(path).folder == checkpoint.folder:
                path.unlink()
        shutil.rmtree(path.parent / checkpoint.folder, ignore_errors=True)

    def _may_name(self, path: Path, folder: str) -> bool:
        """Return whether the description at a path may be that of a folder; True if it cannot be read."""
        try:
            return self._read(path).folder == folder
        except FileNotFoundError:
            return False
        except (OSError, EngineError):
            return True

    def _description_path(self, name: CheckpointName) -> Path:
        return self._runs / run_folder(name.run) / name.kind / f"{name.name}.json"

    def _readable(self, kind_folder: Path) -> Iterator[Checkpoint]:
        for path in kind_folder.glob("[!.]*.json"):
            try:
                yield self._read(path)
            except FileNotFoundError:
                continue  # deleted concurrently
            except EngineError as error:
                log.warning("%s", error)

    def _read(self, path: Path) -> Checkpoint:
        try:
            return _CHECKPOINT.validate_json(path.read_bytes())
        except ValidationError as error:
            raise EngineError(
                f"The checkpoint description {path} is damaged: load an earlier checkpoint, and delete the file before "
                "you save under this name again."
            ) from error


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialize tensors as a safetensors file, which cannot contain code."""
    return safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def _write_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, StoredFile]:
    folder.mkdir(parents=True)
    stored = {name: StoredFile(len(content), write_durably(folder / name, content)) for name, content in files.items()}
    flush_folder(folder)
    return stored
