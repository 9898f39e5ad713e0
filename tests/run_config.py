"""Config fields shared by the small runs of all methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def run_fields(folder: Path, run_name: str, tracking: str, base_url: str) -> dict[str, Any]:
    """Return a run of the tiny model on one thread, stored in `folder`."""
    return {
        "run_name": run_name,
        "model": "tiny",
        "base_url": base_url,
        "engine": {"threads": 1},
        "storage": str(folder / "runs"),
        "tracking": tracking,
    }
