"""Intervals and tests by problem: against scipy, enumeration and simulated policies."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy import stats

from tasks.common.graders import pass_at
from tasks.evaluation.intervals import compare_scores, proportion_interval

NUM_PROBLEMS, NUM_SAMPLES = 30, 4


def test_interval_is_wilsons_for_one_answer_per_problem() -> None:
    for num_right in (3, 100, 180):
        scores = [1.0] * num_right + [0.0] * (200 - num_right)
        interval = proportion_interval(scores)
        expected = stats.binomtest(num_right, 200).proportion_ci(method="wilson")
        assert interval == pytest.approx((expected.low, expected.high), abs=2e-3)
    assert proportion_interval([1.0]) is None
    # Quantile of t with 9 degrees of freedom: 10 / (10 + t ** 2).
    assert proportion_interval([1.0] * 10) == pytest.approx((10 / (10 + stats.t.ppf(0.975, 9) ** 2), 1.0))


def test_interval_covers_the_probability_of_pass_at_k() -> None:
    """Problems of different difficulty, several answers to each."""
    generator = np.random.default_rng(0)
    population = generator.beta(0.5, 1.0, 100_000)
    truth, k, num_runs = float(np.mean(1 - (1 - population) ** 2)), 2, 1000
    num_covered = 0
    for _ in range(num_runs):
        rates = generator.choice(population, NUM_PROBLEMS)
        interval = proportion_interval(
            [pass_at(k, NUM_SAMPLES, int(num)) for num in generator.binomial(NUM_SAMPLES, rates)]
        )
        assert interval is not None
        num_covered += interval.low <= truth <= interval.high
    assert num_covered >= stats.binom.ppf(0.001, num_runs, 0.94)


def test_difference_equals_enumeration_and_scipy() -> None:
    generator = np.random.default_rng(1)
    first, second = generator.binomial(NUM_SAMPLES, 0.6, 9) / NUM_SAMPLES, generator.random(9)
    difference = compare_scores(list(first - second))
    means = [np.mean(np.array(signs) * (first - second)) for signs in product((1, -1), repeat=9)]
    assert difference.p_value == pytest.approx(np.mean(np.array(means) >= difference.mean - 1e-12))
    expected = stats.ttest_rel(first, second)
    assert difference.mean == pytest.approx(np.mean(first - second))
    assert difference.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    metrics = difference.metrics("test/m")
    assert metrics["difference/test/m"] == difference.mean
    assert metrics.keys() == {f"difference/test/m{end}" for end in ("", "_p_value", "_low", "_high", "_detectable")}


@pytest.mark.parametrize(
    ("scores", "p_value"), [([0.5] * 3, 1 / 8), ([0.0] * 20, 1.0), ([1.0], 0.5), ([-1.0] * 3, 1.0)]
)
def test_equal_differences_have_no_interval(scores: list[float], p_value: float) -> None:
    difference = compare_scores(scores)
    assert difference.p_value == pytest.approx(p_value)
    assert difference.interval is None
    assert difference.detectable is None


def test_equal_policies_rarely_differ() -> None:
    """1,000 comparisons of two equal policies: at most 5 % are significant, within the binomial bound of 0.1 %."""
    generator, num_runs = np.random.default_rng(2), 1000
    num_significant = 0
    for _ in range(num_runs):
        rates = generator.beta(0.5, 0.5, NUM_PROBLEMS)
        first, second = (generator.binomial(NUM_SAMPLES, rates) / NUM_SAMPLES for _ in range(2))
        num_significant += compare_scores(list(first - second)).p_value <= 0.05
    assert num_significant <= stats.binom.ppf(0.999, num_runs, 0.05)


def test_the_detectable_difference_is_found_with_a_probability_of_80_percent() -> None:
    generator, num_runs = np.random.default_rng(3), 300
    detectable = compare_scores(list(generator.normal(0, 1, 10_000))).detectable
    assert detectable is not None
    effect = detectable * np.sqrt(10_000 / NUM_PROBLEMS)
    found = [compare_scores(list(generator.normal(effect, 1, NUM_PROBLEMS))).p_value <= 0.05 for _ in range(num_runs)]
    assert np.mean(found) == pytest.approx(0.8, abs=0.07)
