"""What the small runs of all methods have in common, as fields of their configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def run_fields(folder: Path, run_name: str, tracking: str, base_url: str) -> dict[str, Any]:
    """The tiny model, on one thread; the run's record lies below `folder`."""
    return {
        "run_name": run_name,
        "model": "tiny",
        "base_url": base_url,
        "engine": {"threads": 1},
        "storage": str(folder / "runs"),
        "tracking": tracking,
    }
