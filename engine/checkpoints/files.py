"""Files that are whole or not there: written aside, flushed to the disk, checksummed, renamed."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.errors import EngineError


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn an OSError of the block (a full disk, above all) into one sentence about ``what``."""
    try:
        yield
    except OSError as error:
        raise EngineError(
            f"{what} could not be written ({error.strerror or error}); nothing of it was kept and nothing else "
            "changed: make room in the engine's state folder and save again."
        ) from error


def write_durably(path: Path, content: bytes) -> str:
    """Write a file and wait until the disk has it; returns the SHA-256 of what was written."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Put a JSON file in place atomically: readers see the old one or the new one."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_durably(aside, json.dumps(content, indent=1).encode())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make renames inside ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
