"""Paired differences of a sweep's points from the best one, against scipy, enumeration and simulated sweeps."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, product

import numpy as np
import pytest
from scipy.stats import binom, ttest_rel

from flows.sweeps.differences import PointDifference, compare_with_best
from tasks.evaluation import multiple_comparisons
from tasks.evaluation.multiple_comparisons import compare_with_first
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


def test_p_values_equal_the_enumeration_of_all_pairs_and_signs() -> None:
    """4 points, 7 problems; the intervals are those of scipy with Bonferroni's correction for 6 pairs."""
    scores = np.random.default_rng(1).normal(0, 1, (4, 7)) + np.array([1.5, 0.5, 0.3, 0.0])[:, None]
    scores = scores[np.argsort(-scores.mean(axis=1))]

    def statistic(differences: np.ndarray) -> float:
        return abs(differences.sum()) / np.sqrt((differences**2).sum())

    largest = [
        max(statistic((scores[i] - scores[j]) * np.array(signs)) for i, j in combinations(range(4), 2))
        for signs in product((1, -1), repeat=7)
    ]
    for difference, other in zip(compare_with_first(scores), scores[1:], strict=True):
        expected = np.mean(np.array(largest) >= statistic(scores[0] - other) - 1e-9)
        assert difference.p_value == pytest.approx(expected)
        interval = ttest_rel(scores[0], other).confidence_interval(1 - 0.05 / 6)
        assert difference.interval == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(("num_problems", "rate"), [(40, None), (100, 0.05)])
@pytest.mark.parametrize("num_points", [2, pytest.param(8, marks=pytest.mark.slow), 20])
def test_equal_points_rarely_differ(
    num_points: int, num_problems: int, rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 sweeps: at most 5 % have a significant difference, and one whose interval lacks 0, anywhere in the table.

    Problems of different difficulty with three answers each, or hard problems with one answer.
    """
    monkeypatch.setattr(multiple_comparisons, "smallest_detectable", lambda *_: None)
    monkeypatch.setattr(multiple_comparisons, "NUM_FLIPS", 999)
    generator, num_runs = np.random.default_rng(2), 1000
    num_significant = num_missed = 0
    for _ in range(num_runs):
        rates = generator.beta(0.5, 0.5, num_problems) if rate is None else np.full(num_problems, rate)
        num_answers = 3 if rate is None else 1
        scores = generator.binomial(num_answers, rates, (num_points, num_problems)) / num_answers
        compared = compare_with_first(scores[np.argsort(-scores.mean(axis=1))])
        num_significant += any(difference.p_value <= 0.05 for difference in compared)
        num_missed += any(d.interval is not None and not d.interval.low <= 0 <= d.interval.high for d in compared)
    bound = binom.ppf(0.999, num_runs, 0.05)
    assert num_significant <= bound
    assert num_missed <= bound


@pytest.mark.parametrize("kind", ["binary", "continuous"])
@pytest.mark.parametrize("num_points", [2, 6])
def test_the_detectable_difference_is_found_with_a_probability_of_80_percent(
    kind: str, num_points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of the differences that sweeps over equal points state, against the power of the test itself."""
    generator, num_problems, num_runs = np.random.default_rng(3), 30, 400

    def draw(effect: float) -> np.ndarray:
        """Scores of points, the first of which is better by a true difference."""
        shape, means = (num_points, num_problems), np.full((num_points, 1), -effect / 2)
        means[0] *= -1
        if kind == "continuous":
            return means + generator.normal(0, 1, shape)
        return (generator.random(shape) < 0.5 + means).astype(float)

    stated = [compare_with_first(draw(0.0))[0].detectable for _ in range(30)]
    effect = float(np.mean([value for value in stated if value is not None]))
    monkeypatch.setattr(multiple_comparisons, "smallest_detectable", lambda *_: None)
    monkeypatch.setattr(multiple_comparisons, "NUM_FLIPS", 1999)
    found = [compare_with_first(draw(effect))[0].p_value <= 0.05 for _ in range(num_runs)]
    assert np.mean(found) == pytest.approx(0.8, abs=0.07)


def test_few_pairs_detect_nothing() -> None:
    """Five pairs: both signs of the same differences make 2 / 32 of all signs."""
    differences = [compare_with_first(np.array([[1.0] * num, [0.0] * num]))[0] for num in (5, 6)]
    assert [difference.p_value for difference in differences] == [2 / 32, 2 / 64]
    assert differences[0].detectable is None
    assert differences[1].detectable is not None
    many = compare_with_first(np.linspace(1, 0, 10)[:, None].repeat(6, axis=1))  # The pairs share all signs.
    assert [difference.p_value for difference in many] == [2 / 64] * 9
    assert PointDifference(2, differences[0], 5, "seeds").cells() == ("2", "1", "5 seeds", "0.0625", "none")
