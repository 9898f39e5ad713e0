"""Intervals and tests by problem: against scipy, enumeration and simulated policies."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import root_scalar

from tasks.common.graders import pass_at
from tasks.common.proportions import proportion_interval
from tasks.evaluation import intervals
from tasks.evaluation.intervals import (
    compare_scores,
    detectable_difference,
    num_problems_needed,
    sign_flip_p_value,
)

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
    assert difference.p_value == pytest.approx(np.mean(np.abs(means) >= abs(difference.mean) - 1e-12))
    assert compare_scores(list(second - first)).p_value == difference.p_value
    expected = stats.ttest_rel(first, second)
    assert difference.mean == pytest.approx(np.mean(first - second))
    assert difference.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    metrics = difference.metrics("test/m")
    assert metrics["difference/test/m"] == difference.mean
    assert metrics.keys() == {f"difference/test/m{end}" for end in ("", "_p_value", "_low", "_high", "_detectable")}


@pytest.mark.parametrize(
    ("scores", "p_value", "has_detectable"),
    [
        ([0.5] * 3, 1 / 4, False),
        ([0.5] * 8, 1 / 128, True),
        ([0.0] * 20, 1.0, False),
        ([1.0], 1.0, False),
        ([-1.0] * 3, 1 / 4, False),
    ],
)
def test_equal_differences_have_no_interval(scores: list[float], p_value: float, has_detectable: bool) -> None:
    difference = compare_scores(scores)
    assert difference.p_value == pytest.approx(p_value)
    assert difference.interval is None
    assert (difference.detectable is not None) == has_detectable


def test_equal_policies_rarely_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 comparisons of two equal policies: at most 5 % are significant, within the binomial bound of 0.1 %."""
    monkeypatch.setattr(intervals, "NUM_FLIPS", 999)
    generator, num_runs = np.random.default_rng(2), 1000
    num_significant = 0
    for _ in range(num_runs):
        rates = generator.beta(0.5, 0.5, NUM_PROBLEMS)
        first, second = (generator.binomial(NUM_SAMPLES, rates) / NUM_SAMPLES for _ in range(2))
        num_significant += sign_flip_p_value(list(first - second)) <= 0.05
    assert num_significant <= stats.binom.ppf(0.999, num_runs, 0.05)


def draw_differences(kind: str, effect: float, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Differences with a true mean: normal ones, or those of right and wrong answers."""
    if kind == "continuous":
        return generator.normal(effect, 1, shape)
    first, second = generator.random(shape) < 0.5 + effect / 2, generator.random(shape) < 0.5 - effect / 2
    return first.astype(float) - second


@pytest.mark.parametrize("kind", ["binary", "continuous"])
@pytest.mark.parametrize("num_problems", [8, pytest.param(30, marks=pytest.mark.slow)])
def test_the_detectable_difference_is_found_with_a_probability_of_80_percent(kind: str, num_problems: int) -> None:
    """The mean of the differences that comparisons of equal policies state, against the power by brute force."""
    generator = np.random.default_rng(3)
    stated = [detectable_difference([*draw_differences(kind, 0.0, (num_problems,), generator)]) for _ in range(60)]
    effects = [effect for effect in stated if effect is not None]
    assert len(effects) == len(stated)
    differences_RP = draw_differences(kind, float(np.mean(effects)), (1000, num_problems), generator)
    flips_FP = generator.choice((-1.0, 1.0), (20_000, num_problems))
    sums_RF = differences_RP @ flips_FP.T
    p_values_R = (sums_RF >= differences_RP.sum(axis=1)[:, None] - 1e-9).mean(axis=1)
    # Twice the standard errors of the mean effect and of the power.
    assert np.mean(p_values_R <= 0.05) == pytest.approx(0.8, abs=0.06)


def test_the_detectable_difference_does_not_depend_on_the_observed_one() -> None:
    differences = np.random.default_rng(5).normal(0, 1, 15)
    stated = [detectable_difference([*(differences + effect)]) for effect in (0.0, 20.0)]
    assert stated[0] is not None
    assert stated[1] == pytest.approx(stated[0], rel=1e-3)


@pytest.mark.parametrize("kind", ["binary", "continuous"])
def test_four_problems_detect_nothing(kind: str) -> None:
    """2 ** -4 exceeds 5 %: even four better answers are not significant."""
    generator = np.random.default_rng(4)
    for effect in (0.0, 1.0):
        assert detectable_difference([*draw_differences(kind, effect, (4,), generator)]) is None
    assert "difference/m_detectable" not in compare_scores([1.0, 0.9, 0.8, 1.0]).metrics("m")
    assert [num_problems_needed(level) for level in (0.5, 0.0625, 0.05, 0.001)] == [1, 4, 5, 10]


@pytest.mark.parametrize("level", [0.05, 0.01])
def test_rare_differences_need_a_larger_effect(level: float) -> None:
    """4 better answers to 200 problems are not significant: the exact power of McNemar's test at the stated effect.

    The simulated answers keep the odds ratio of equal policies that differ on 4 of 200 problems.
    """
    scores, num = [1.0] * 4 + [0.0] * 196, 200
    assert sign_flip_p_value(scores) > 0.05
    effect = detectable_difference(scores, level)
    assert effect is not None
    assert effect > 0.02
    ratio = (0.01 / 0.98) ** 2

    def odds_ratio(better: float) -> float:
        worse = better - effect
        return better * worse / (1 - better - worse) ** 2 - ratio

    better = float(root_scalar(odds_ratio, bracket=(effect, (1 + effect) / 2 - 1e-6)).root)
    power = 0.0
    for num_different in range(1, 60):
        probability = stats.binom.pmf(num_different, num, 2 * better - effect)
        right = np.arange(num_different + 1)
        p_values = stats.binom.sf(right - 1, num_different, 0.5)
        shares = stats.binom.pmf(right, num_different, better / (2 * better - effect))
        power += probability * shares[p_values <= level].sum()
    # Three times the standard error of 1,000 simulated comparisons.
    assert power == pytest.approx(0.8, abs=0.04)
