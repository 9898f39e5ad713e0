"""Differences of the points of a sweep from the best one, over the same problems or the same seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from tasks.evaluation.intervals import Difference, compare_scores
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
        num_pairs: number of compared pairs.
        unit: what is paired.
    """

    point: int
    difference: Difference
    num_pairs: int
    unit: Literal["problems", "seeds"]

    def cells(self) -> tuple[str, ...]:
        """Text cells, in the order of `DIFFERENCE_COLUMNS`."""
        interval, detectable = self.difference.interval, self.difference.detectable
        half = "" if interval is None else f" ± {(interval.high - interval.low) / 2:.3g}"
        smallest = "" if detectable is None else f"{detectable:.3g}"
        pairs = f"{self.num_pairs} {self.unit}"
        return str(self.point), f"{self.difference.mean:.4g}{half}", pairs, f"{self.difference.p_value:.3g}", smallest


def compare_with_best(rows: Sequence[PointRow], scores: Scores, mode: Literal["min", "max"]) -> list[PointDifference]:
    """Compare each complete point with the best one; points with less than two pairs are left out.

    Problems are paired if all trials of both points have scores of the same problems, averaged over the seeds;
    otherwise the seeds are paired.

    Args:
        rows: points, the best first.
        mode: `min` if smaller values are better.
    """
    complete = [row for row in rows if row.is_complete]
    sign = 1.0 if mode == "min" else -1.0
    compared: list[PointDifference] = []
    for row in complete[1:]:
        pair = (row, complete[0])
        unit, values = "problems", _by_problem(pair, scores)
        if not values:
            unit, values = "seeds", _by_seed(pair)
        differences = [sign * (other - best) for other, best in values]
        if len(differences) > 1:
            compared.append(PointDifference(row.point.number, compare_scores(differences), len(differences), unit))
    return compared


def _by_problem(pair: tuple[PointRow, PointRow], scores: Scores) -> list[tuple[float, float]]:
    """Return the mean score of each problem at both points; nothing if the trials have other or no scores."""
    by_point = [[scores.get((row.point.number, trial.seed)) for trial in row.completed] for row in pair]
    first = by_point[0][0]
    if first is None or not all(first.is_paired_with(values) for of_point in by_point for values in of_point):
        return []
    means = [
        [fmean(values) for values in zip(*(v.values_B for v in of_point if v), strict=True)] for of_point in by_point
    ]
    return list(zip(*means, strict=True))


def _by_seed(pair: tuple[PointRow, PointRow]) -> list[tuple[float, float]]:
    """Return the values of both points for each seed."""
    first, second = ({trial.seed: trial.value for trial in row.completed if trial.value is not None} for row in pair)
    return [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]
