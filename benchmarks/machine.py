"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "prefect", "tinker", "tinker-cookbook")


def describe() -> str:
    """Processor, how busy it is, commit and versions, a line each."""
    load_1min, _, _ = os.getloadavg()
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return (
        f"hardware  {os.cpu_count()} cores, {_processor()}, load {load_1min:.1f} before the start\n"
        f"commit    {_commit()}\n"
        f"versions  python {platform.python_version()}, {versions}"
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    here = Path(__file__).parent
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=, with changes"], cwd=here, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "none: not a git checkout"
