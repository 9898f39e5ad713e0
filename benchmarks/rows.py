"""Benchmark results: comparisons with a peer measured in the same run, and the machine that measured them."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.table import Table

PACKAGES = ("torch", "prefect", "tinker", "tinker-cookbook")


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Attributes:
        name: measured quantity and problem size.
        unit: unit of both figures.
        ours, peer: one figure per repetition; figures at the same index were measured consecutively.
        peer_name: description of the peer.
        note: additional information, printed on its own line.
    """

    name: str
    unit: str
    ours: Sequence[float]
    peer: Sequence[float]
    peer_name: str
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        return [ours / peer for ours, peer in zip(self.ours, self.peer, strict=True)]


def spread(figures: Sequence[float]) -> str:
    """Format the median, minimum and maximum.

    >>> spread([3.0, 1.0, 2.0])
    '2.00 (1.00-3.00)'
    """
    return f"{_three_digits(statistics.median(figures))} ({_three_digits(min(figures))}-{_three_digits(max(figures))})"


def table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table for a terminal, with median, minimum and maximum over the repetitions."""
    result = Table(title="median (min-max) over repetitions", title_justify="left")
    result.add_column("benchmark", overflow="fold")
    for column in ("ours", "peer", "ratio"):
        result.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        lines = (f"[bold]{row.name}[/bold]", f"peer: {row.peer_name}", row.note)
        result.add_row(
            "\n".join(line for line in lines if line),
            f"{spread(row.ours)} {row.unit}",
            f"{spread(row.peer)} {row.unit}",
            spread(row.ratios),
            end_section=True,
        )
    return result


def describe_machine() -> str:
    """Return three lines: processor and load, commit, versions."""
    load_1min, _, _ = os.getloadavg()
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return (
        f"hardware  {hardware()}, load {load_1min:.1f} before the start\n"
        f"commit    {commit()}\n"
        f"versions  python {platform.python_version()}, {versions}"
    )


def hardware() -> str:
    """Describe the processor."""
    return f"{os.cpu_count()} cores, {_processor()}"


def on_device(device: str, dtype: str) -> str:
    """Return the part of a row's name that names a GPU and the dtype; empty for the CPU, which `hardware` describes.

    >>> on_device("cpu", "float32")
    ''
    """
    if device == "cpu":
        return ""
    import torch

    return f", {dtype}, on {torch.cuda.get_device_name(device)}"


def _three_digits(figure: float) -> str:
    return f"{figure:.0f}" if abs(figure) >= 100 else f"{figure:.1f}" if abs(figure) >= 10 else f"{figure:.2f}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """Describe the commit of the working tree, and whether the tree has changes."""
    folder = Path(__file__).parent
    if shutil.which("git") is None:
        return "none: git is not installed"
    description = subprocess.run(
        ["git", "describe", "--always", "--dirty=, with changes"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return description.stdout.strip() or "none: not a git checkout"
