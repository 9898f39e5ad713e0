"""Paired differences of a sweep's points from the best one, against scipy's tests of the same pairs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from scipy.stats import ttest_rel

from flows.sweeps.differences import PointDifference, compare_with_best
from tasks.sweeps.store import Point, Trial, Trials
from tasks.sweeps.table import PointRow, point_rows
from tasks.training.held_out import BatchValues

GENERATOR = np.random.default_rng(0)
SEEDS = (0, 1, 2)
# Scores by point, seed and problem: point 2 is the best; problems differ more than points.
SCORES = GENERATOR.normal(0, 1, 12) + np.array([0.0, 0.4])[:, None, None] + GENERATOR.normal(0, 0.3, (2, 3, 12))


def rows_of(values: Mapping[tuple[int, int], float], mode: str = "max") -> list[PointRow]:
    finished = {key: Trial(*key, "x", "completed", value=value) for key, value in values.items()}
    points = tuple(Point(number, {}) for number in sorted({number for number, _ in values}))
    return point_rows(Trials(points, finished), SEEDS, "m", mode)  # pyright: ignore[reportArgumentType]


def values_of(scores: np.ndarray) -> dict[tuple[int, int], float]:
    return {(p + 1, seed): float(scores[p, seed].mean()) for p in range(len(scores)) for seed in SEEDS}


def check(compared: PointDifference, best: np.ndarray, other: np.ndarray) -> None:
    expected = ttest_rel(best, other).confidence_interval(0.95)
    assert compared.difference.interval == pytest.approx((expected.low, expected.high))
    assert compared.difference.mean == pytest.approx(float((best - other).mean()))
    assert compared.num_pairs == len(best)


def test_problems_are_paired_over_the_mean_of_the_seeds() -> None:
    scores = {(p + 1, seed): BatchValues([*SCORES[p, seed]], [1] * 12, "a") for p in (0, 1) for seed in SEEDS}
    (compared,) = compare_with_best(rows_of(values_of(SCORES)), scores, "max")
    assert (compared.point, compared.unit) == (1, "problems")
    check(compared, SCORES[1].mean(axis=0), SCORES[0].mean(axis=0))


@pytest.mark.parametrize("digest", ["b", None])
def test_seeds_are_paired_if_the_problems_differ_or_have_no_scores(digest: str | None) -> None:
    scores = {(p + 1, seed): BatchValues([*SCORES[p, seed]], [1] * 12, "a") for p in (0, 1) for seed in SEEDS}
    if digest:
        scores[1, 2] = BatchValues([0.0] * 12, [1] * 12, digest)
    else:
        del scores[1, 2]
    (compared,) = compare_with_best(rows_of(values_of(SCORES)), scores, "max")
    assert compared.unit == "seeds"
    check(compared, SCORES[1].mean(axis=1), SCORES[0].mean(axis=1))


def test_differences_are_positive_where_the_best_point_is_better() -> None:
    """With `min`, point 1 is the best."""
    (compared,) = compare_with_best(rows_of(values_of(SCORES), "min"), {}, "min")
    assert compared.point == 2
    check(compared, SCORES[1].mean(axis=1), SCORES[0].mean(axis=1))


def test_points_without_pairs_are_left_out() -> None:
    assert compare_with_best(rows_of({(1, 0): 1.0, (1, 1): 2.0, (1, 2): 3.0, (2, 0): 0.5}), {}, "min") == []
    assert compare_with_best([], {}, "min") == []
