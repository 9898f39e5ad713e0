"""A folder that the system does not let a test read. Root can read all, so permissions alone do not refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def close_folder(monkeypatch: pytest.MonkeyPatch, name: str, method: str) -> None:
    """Let a method of the paths in every folder of this name raise a PermissionError."""
    original = getattr(Path, method)

    def refuse(path: Path) -> Any:
        if path.parent.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(Path, method, refuse)
