"""Differences of the points of a sweep from the best one, over the same problems or the same seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tasks.evaluation.intervals import Difference, Floats
from tasks.evaluation.multiple_comparisons import compare_with_first
from tasks.reports.tables import Estimate
from tasks.sweeps.table import PointRow
from tasks.training.held_out import BatchValues

# Scores of each problem at the end of a trial, by point and seed.
Scores = Mapping[tuple[int, int], BatchValues]


@dataclass(frozen=True, slots=True)
class PointDifference:
    """Comparison of a point with the best one.

    Attributes:
        point: number of the point.
        difference: mean difference, positive where the best point is better.
        num_pairs: number of problems or seeds.
        unit: what is paired.
    """

    point: int
    difference: Difference
    num_pairs: int
    unit: Literal["problems", "seeds"]

    def cells(self) -> tuple[str, ...]:
        """Text cells, in the order of `DIFFERENCE_COLUMNS`."""
        interval, detectable = self.difference.interval, self.difference.detectable
        half_width = math.nan if interval is None else (interval.high - interval.low) / 2
        difference = str(Estimate(self.difference.mean, half_width))
        smallest = "none" if detectable is None else f"{detectable:.3g}"
        pairs = f"{self.num_pairs} {self.unit}"
        return str(self.point), difference, pairs, f"{self.difference.p_value:.3g}", smallest


def compare_with_best(rows: Sequence[PointRow], scores: Scores, mode: Literal["min", "max"]) -> list[PointDifference]:
    """Compare each complete point with the best one; return an empty list for fewer than two points or two pairs.

    Problems are paired if all trials of these points have scores of the same problems, averaged over the seeds;
    otherwise the seeds are paired.

    Args:
        rows: points, the best first.
        mode: `min` if smaller values are better.
    """
    complete = [row for row in rows if row.is_complete]
    if len(complete) < 2:
        return []
    unit, values_KU = "problems", _by_problem(complete, scores)
    if values_KU is None:
        unit, values_KU = "seeds", _by_seed(complete)
    num_pairs = values_KU.shape[1]
    if num_pairs < 2:
        return []
    differences = compare_with_first(values_KU if mode == "max" else -values_KU)
    return [
        PointDifference(row.point.number, difference, num_pairs, unit)
        for row, difference in zip(complete[1:], differences, strict=True)
    ]


def _by_problem(rows: Sequence[PointRow], scores: Scores) -> Floats | None:
    """Return the mean score of each problem at each point; None unless all trials have scores of the same problems."""
    by_point = [[scores.get((row.point.number, trial.seed)) for trial in row.completed] for row in rows]
    first = by_point[0][0]
    if first is None or not all(first.is_paired_with(values) for of_point in by_point for values in of_point):
        return None
    return np.array([np.mean([values.weighted_S for values in of_point if values], axis=0) for of_point in by_point])


def _by_seed(rows: Sequence[PointRow]) -> Floats:
    """Return the value of each seed at each point."""
    by_point = [{trial.seed: trial.value for trial in row.completed if trial.value is not None} for row in rows]
    seeds = sorted(set[int].intersection(*(set(values) for values in by_point)))
    return np.array([[values[seed] for seed in seeds] for values in by_point])
