"""Durable writes: files flushed to disk with a checksum, and JSON files replaced atomically."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from engine.errors import EngineError


@contextmanager
def disk_errors(subject: str) -> Iterator[None]:
    """Convert an OSError inside the block, such as a full disk, to an EngineError about ``subject``."""
    try:
        yield
    except OSError as error:
        raise EngineError(
            f"{subject} could not be written ({error.strerror or error}): free space in the engine's state folder, "
            "or make it writable, and try again."
        ) from error


def write_durably(path: Path, content: bytes) -> str:
    """Write and flush a file; return the SHA-256 of ``content``."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def replace_json(path: Path, content: Mapping[str, object]) -> None:
    """Replace a JSON file atomically: readers see the old content or the new one."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_durably(temporary, json.dumps(content, indent=1).encode())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Flush a folder, so that renames inside it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
