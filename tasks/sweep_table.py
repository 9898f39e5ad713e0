"""The table of a sweep: one row per point, with the mean over its seeds and an interval for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from scipy.stats import t

from tasks.trials import Point, Trial, Trials

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class PointRow:
    """What a point came to.

    Attributes:
        point: which one.
        trials: of its seeds, those that have ended.
        completed: those that completed.
        is_complete: whether one of each seed did.
        mean: of the metric over those that completed; None where none did.
        half_width: of its interval; None for fewer than two.
    """

    point: Point
    trials: Sequence[Trial]
    completed: Sequence[Trial]
    is_complete: bool
    mean: float | None
    half_width: float | None

    def mean_of(self, metric: str) -> float:
        """The mean of any metric over the trials that completed; NaN where they do not have it."""
        values = [trial.metrics[metric] for trial in self.completed if metric in trial.metrics]
        return fmean(values) if values else math.nan


def point_rows(trials: Trials, seeds: Sequence[int], metric: str, mode: Literal["min", "max"]) -> list[PointRow]:
    """One row per point, the best first; those that lack a seed behind the others, and last those without a value."""
    rows = [_row(point, trials.ended, seeds) for point in trials.points]
    sign = 1.0 if mode == "min" else -1.0

    def order(row: PointRow) -> tuple[bool, float, int]:
        return not row.is_complete, math.inf if row.mean is None else sign * row.mean, row.point.number

    return sorted(rows, key=order)


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval for the mean of a few values, by Student's t; None for fewer than two.

    >>> round(interval([1.0, 2.0, 3.0]), 3)
    2.484
    """
    if len(values) < 2:
        return None
    return float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def dimensions(rows: Sequence[PointRow]) -> list[str]:
    """What the points differ in, in the order of the first that has it."""
    return list(dict.fromkeys(name for row in rows for name in row.point.values))


def short(name: str) -> str:
    """What a dimension is called where there is little room.

    >>> short("objective.regularizers.topology.weight"), short("data.params.common_config.batch_size")
    ('topology.weight', 'batch_size')
    """
    return name.removeprefix("objective.regularizers.") if name.startswith("objective.reg") else name.split(".")[-1]


def columns_of(rows: Sequence[PointRow], metric: str) -> tuple[str, ...]:
    """The head of the table."""
    return ("point", *(short(name) for name in dimensions(rows)), metric, "95 % interval", "trials", "s per trial")


def row_cells(row: PointRow, rows: Sequence[PointRow]) -> tuple[str, ...]:
    """A row as text, in the order of `columns_of`."""
    values = (_shown(row.point.values, name) for name in dimensions(rows))
    mean = "" if row.mean is None else f"{row.mean:.4f}"
    half = "" if row.half_width is None else f"± {row.half_width:.4f}"
    seconds = f"{fmean(trial.seconds for trial in row.trials):.1f}" if row.trials else ""
    return str(row.point.number), *values, mean, half, _ends(row.trials), seconds


def _row(point: Point, ended: Mapping[tuple[int, int], Trial], seeds: Sequence[int]) -> PointRow:
    trials = [trial for trial in ended.values() if trial.point == point.number]
    completed = [trial for trial in trials if trial.status == "completed" and trial.value is not None]
    values = [trial.value for trial in completed if trial.value is not None]
    return PointRow(
        point=point,
        trials=trials,
        completed=completed,
        is_complete=set(seeds) <= {trial.seed for trial in completed},
        mean=fmean(values) if values else None,
        half_width=interval(values),
    )


def _shown(values: Mapping[str, str | int | float | bool], name: str) -> str:
    value = values.get(name, "")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _ends(trials: Sequence[Trial]) -> str:
    statuses = [trial.status for trial in trials]
    return ", ".join(f"{statuses.count(each)} {each}" for each in ("completed", "pruned", "failed") if each in statuses)
