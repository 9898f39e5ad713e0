"""What a benchmark says: a figure of ours beside a peer's, measured in turn in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Attributes:
        name: what is measured, and its size.
        unit: of both figures.
        ours, peer: one figure per repetition; those at the same index were measured next to each other.
        peer_name: what ours is compared with.
        note: what else there is to say, on a line of its own.
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
    """The median, with the least and the greatest.

    >>> spread([3.0, 1.0, 2.0])
    '2.00 (1.00-3.00)'
    """
    return f"{_three_digits(statistics.median(figures))} ({_three_digits(min(figures))}-{_three_digits(max(figures))})"


def table(rows: Sequence[Row]) -> Table:
    """All rows for the terminal: medians over the repetitions, with the least and the greatest."""
    made = Table(title="median (min-max) over repetitions", title_justify="left")
    made.add_column("benchmark", overflow="fold")
    for column in ("ours", "peer", "ratio"):
        made.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        lines = (f"[bold]{row.name}[/bold]", f"peer: {row.peer_name}", row.note)
        made.add_row(
            "\n".join(line for line in lines if line),
            f"{spread(row.ours)} {row.unit}",
            f"{spread(row.peer)} {row.unit}",
            spread(row.ratios),
            end_section=True,
        )
    return made


def _three_digits(figure: float) -> str:
    return f"{figure:.0f}" if abs(figure) >= 100 else f"{figure:.1f}" if abs(figure) >= 10 else f"{figure:.2f}"
