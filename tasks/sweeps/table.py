"""Table of a sweep: one row per point, with the mean over its seeds and a confidence interval."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

from scipy.special import stdtrit

from tasks.sweeps.store import Point, Trial, Trials

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class PointRow:
    """Results of a point.

    Attributes:
        point: the point.
        trials: finished trials of the point with the seeds of the sweep.
        completed: trials that completed, with their finite metrics.
        is_complete: True if a trial of every seed completed.
        mean: mean of the metric over the completed trials; None if there are none.
        half_width: half width of the mean's interval; None for fewer than two trials or equal values.
    """

    point: Point
    trials: Sequence[Trial]
    completed: Sequence[Trial]
    is_complete: bool
    mean: float | None
    half_width: float | None

    def mean_of(self, metric: str) -> float:
        """Mean of a metric over the completed trials; NaN if they lack it."""
        values = [trial.metrics[metric] for trial in self.completed if metric in trial.metrics]
        return fmean(values) if values else math.nan


def point_rows(trials: Trials, seeds: Sequence[int], metric: str, mode: Literal["min", "max"]) -> list[PointRow]:
    """Rows of all points, the best first; points without a completed trial of each seed come last."""
    rows = [_row(point, trials.finished, seeds) for point in trials.points]
    sign = 1.0 if mode == "min" else -1.0

    def order(row: PointRow) -> tuple[bool, float, int]:
        return not row.is_complete, math.inf if row.mean is None else sign * row.mean, row.point.number

    return sorted(rows, key=order)


def interval(values: Sequence[float]) -> float | None:
    """Half width of the 95 % interval of a mean, by Student's t; None for fewer than two values, or equal ones.

    >>> round(interval([1.0, 2.0, 3.0]), 3)
    2.484
    """
    if len(set(values)) < 2:
        return None
    return float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * stdev(values) / math.sqrt(len(values))


def dimensions(rows: Sequence[PointRow]) -> list[str]:
    """Names of all dimensions of the points, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.point.values))


def short_name(name: str, names: Sequence[str] = ()) -> str:
    """Short name of a dimension, for tables and charts: the last parts of its path that no other dimension has.

    Args:
        names: names of all dimensions.

    >>> short_name("objective.regularizers.topology.weight"), short_name("data.params.common_config.batch_size")
    ('topology.weight', 'batch_size')
    >>> short_name("policy.num_epochs", ["warm_start.num_epochs", "policy.num_epochs"])
    'policy.num_epochs'
    """
    parts, others = name.split("."), [other.split(".") for other in names if other != name]
    shortest = len(parts) - 2 if name.startswith("objective.regularizers.") else 1
    suffixes = [parts[-number:] for number in range(shortest, len(parts))]
    unique = (suffix for suffix in suffixes if not any(other[-len(suffix) :] == suffix for other in others))
    return ".".join(next(unique, parts))


def table_columns(rows: Sequence[PointRow], metric: str) -> tuple[str, ...]:
    """Column names of the table."""
    names = dimensions(rows)
    return ("point", *(short_name(name, names) for name in names), metric, "95 % interval", "trials", "s per trial")


def row_cells(row: PointRow, rows: Sequence[PointRow]) -> tuple[str, ...]:
    """Text cells of a row, in the order of `table_columns`."""
    values = (_value_text(row.point.values, name) for name in dimensions(rows))
    mean = "" if row.mean is None else f"{row.mean:.4f}"
    half = "" if row.half_width is None else f"± {row.half_width:.4f}"
    seconds = f"{fmean(trial.seconds for trial in row.trials):.1f}" if row.trials else ""
    return str(row.point.number), *values, mean, half, _status_counts(row.trials), seconds


def _row(point: Point, finished: Mapping[tuple[int, int], Trial], seeds: Sequence[int]) -> PointRow:
    trials = [trial for trial in finished.values() if trial.point == point.number and trial.seed in seeds]
    completed = [
        replace(trial, metrics={name: value for name, value in trial.metrics.items() if _is_finite(value)})
        for trial in trials
        if trial.status == "completed" and trial.value is not None
    ]
    values = [trial.value for trial in completed if trial.value is not None]
    return PointRow(
        point=point,
        trials=trials,
        completed=completed,
        is_complete=set(seeds) <= {trial.seed for trial in completed},
        mean=fmean(values) if values else None,
        half_width=interval(values),
    )


def _is_finite(value: float) -> bool:
    return math.isfinite(value) and abs(value) < sys.float_info.max  # MLflow stores infinity as the largest number


def _value_text(values: Mapping[str, str | int | float | bool], name: str) -> str:
    value = values.get(name, "")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _status_counts(trials: Sequence[Trial]) -> str:
    counts = Counter(trial.status for trial in trials)
    return ", ".join(f"{counts[status]} {status}" for status in ("completed", "pruned", "failed") if counts[status])
