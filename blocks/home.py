"""Where this project keeps what it makes on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """`$TINKER_FLOWS_HOME`, or `.tinker-flows` in the current directory; made when missing."""
    path = Path(os.environ.get("TINKER_FLOWS_HOME") or ".tinker-flows").resolve()
    path.mkdir(parents=True, exist_ok=True)
    return path
