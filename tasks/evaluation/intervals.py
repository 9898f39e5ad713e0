"""Confidence intervals and tests of scores. Answers to one problem are alike, so each problem is one observation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasks.common.proportions import CONFIDENCE, Interval, t_quantile

# Significance level of a test; a two-sided test has half of it on each side.
LEVEL = 0.05
_POWER = 0.8
# Sign flips of the permutation test; with few problems P, the test uses all 2 ** P sign flips.
NUM_FLIPS = 9999
# Simulated comparisons for the detectable difference, and the maximum number of sign flips in all of them together.
_NUM_SIMULATED = 1000
_MAX_SIMULATED_FLIPS = 20_000_000
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean difference of scores of the same problems.

    Attributes:
        mean: the mean difference.
        interval: confidence interval by Student's t over problems; None if all differences are equal.
        p_value: two-sided p-value of the sign flips: the probability that equal policies differ at least this much.
        detectable: smallest true difference that this test finds at the 5 % level with a probability of 0.8; None if
            there are too few problems, or if all differences are 0.
    """

    mean: float
    interval: Interval | None
    p_value: float
    detectable: float | None

    def metrics(self, name: str) -> dict[str, float]:
        """Return the figures as metrics, `difference/<name>` and so on."""
        figures = {"": self.mean, "_p_value": self.p_value}
        if self.interval is not None:
            figures |= {"_low": self.interval.low, "_high": self.interval.high}
        if self.detectable is not None:
            figures["_detectable"] = self.detectable
        return {f"difference/{name}{suffix}": value for suffix, value in figures.items()}


def compare_scores(differences_P: Sequence[float], error: float | None = None) -> Difference:
    """Compare two policies by their differences of scores, one per problem.

    Args:
        error: standard error of the mean if the scores are shares of problems of uneven sizes.

    >>> compare_scores([-1.0, -1.0, -1.0, -1.0]).p_value  # two of 16 sign flips
    0.125
    """
    level = LEVEL / 2  # of the tests towards each side
    one_sided = [sign_flip_p_value([sign * value for value in differences_P], level) for sign in (1, -1)]
    return Difference(
        float(np.mean(differences_P)),
        difference_interval(differences_P, error=error),
        min(2 * min(one_sided), 1.0),
        detectable_difference(differences_P, level),
    )


def difference_interval(
    differences_P: Sequence[float], confidence: float = CONFIDENCE, error: float | None = None
) -> Interval | None:
    """Confidence interval of a mean difference by Student's t over problems; None if all differences are equal.

    Args:
        error: see `compare_scores`.
    """
    num, mean = len(differences_P), float(np.mean(differences_P))
    if error is None:
        error = float(np.std(differences_P, ddof=1)) / math.sqrt(num) if num > 1 else 0.0
    if num < 2 or error == 0:
        return None
    width = t_quantile(num - 1, (1 + confidence) / 2) * error
    return Interval(mean - width, mean + width)


def sign_flip_p_value(differences_P: Sequence[float], level: float = LEVEL) -> float:
    """Return the p-value of the one-sided test of two equal policies.

    The p-value is the probability of a mean difference of at least this size if each problem's difference had either
    sign with equal probability. The test tries all sign flips of up to 13 problems. With more problems, it tries 9,999
    random sign flips, or more if the level is so low that 9,999 cannot reach it.

    Args:
        level: level to which the p-value is compared.
    """
    if len(differences_P) == 1:
        return 0.5 if differences_P[0] > 0 else 1.0
    from scipy.stats import permutation_test  # takes a third of a second to import, and few runs compare checkpoints

    test = permutation_test(
        (np.asarray(differences_P, dtype=np.float64),),
        np.mean,
        permutation_type="samples",
        alternative="greater",
        vectorized=True,
        n_resamples=max(NUM_FLIPS, math.ceil(10 / level)),  # about 10 flips of equal policies are beyond the level
        batch=max(10_000_000 // len(differences_P), 1),
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def num_problems_needed(level: float) -> int:
    """Return the smallest number of problems at which the sign flips can be significant.

    >>> num_problems_needed(0.05)  # 2 ** -5 is 0.031
    5
    """
    return math.ceil(-math.log2(level) - 1e-9)


def detectable_difference(differences_P: Sequence[float], level: float = LEVEL) -> float | None:
    """Return the smallest true difference that the sign flips find significant with a probability of 0.8.

    Args:
        level: level of the one-sided test.

    Returns:
        The difference; None if there are too few problems to be significant, or if all differences are 0.
    """
    if len(differences_P) < num_problems_needed(level):
        return None
    # About 50 flips of equal policies are beyond the level, or at least 5 if 50 would take more than `NUM_FLIPS` flips.
    num_flips = max(min(math.ceil(50 / level), NUM_FLIPS), math.ceil(5 / level))
    signs_FP = random_signs(len(differences_P), num_flips, np.random.default_rng(0)).astype(np.float32)

    def is_significant(differences_RP: Floats) -> NDArray[np.bool_]:
        flipped_RF = differences_RP.astype(np.float32) @ signs_FP.T
        # The tolerance exceeds the rounding of float32, so that equal sums count.
        num_greater_R = (flipped_RF >= flipped_RF[:, :1] - 1e-3).sum(axis=1)
        return num_greater_R <= level * len(signs_FP) + 1e-9

    return smallest_detectable(differences_P, is_significant, _MAX_SIMULATED_FLIPS // len(signs_FP))


def smallest_detectable(
    differences_P: Sequence[float], is_significant: Callable[[Floats], NDArray[np.bool_]], max_simulated: int
) -> float | None:
    """Return the smallest true difference that a test finds significant with a probability of 0.8.

    The function simulates comparisons with the same number of problems. If most sizes are distinct, as with continuous
    scores, a difference is the true difference plus or minus a deviation from the observed mean. Otherwise, as with
    right and wrong answers, the differences have the observed sizes, and the probability of a difference `d` is
    multiplied by a factor proportional to `exp(tilt * d)`, which changes the log-odds of a right answer.

    Args:
        is_significant: test of R comparisons, whose differences ``(R, P)`` are scaled so that the largest size without
            a true difference is 1. It must find equal positive differences significant.
        max_simulated: maximum number of simulated comparisons.

    Returns:
        The difference; None if all differences are 0.
    """
    num, sizes_P = len(differences_P), np.abs(differences_P)
    is_continuous = num > 1 and len(np.unique(sizes_P)) > 0.75 * num
    if is_continuous:  # the factor makes the mean square of the deviations an unbiased variance
        sizes_P = np.abs(np.asarray(differences_P) - np.mean(differences_P)) * math.sqrt(num / (num - 1))
    scale = float(sizes_P.max())
    if scale == 0:
        return None
    sizes_P = sizes_P / scale
    values_V = np.sort(np.concatenate([-sizes_P, sizes_P]))
    draws_RP = np.random.default_rng(1).random((min(_NUM_SIMULATED, max_simulated), num))

    def shares(tilt: float) -> Floats:
        weights_V = np.exp(tilt * (values_V - values_V[-1]))
        return weights_V / weights_V.sum()

    def excess_power(effect: float) -> float:
        tilt, shift = (0.0, effect) if is_continuous else (effect, 0.0)
        index_RP = np.searchsorted(np.cumsum(shares(tilt)), draws_RP)
        simulated_RP = values_V[np.minimum(index_RP, len(values_V) - 1)] + shift
        return float(is_significant(simulated_RP).mean()) - _POWER

    from scipy.optimize import root_scalar  # takes long to import

    # At the upper end, all differences are positive and nearly equal.
    effect = float(root_scalar(excess_power, bracket=(0.0, 1000.0 if is_continuous else 50.0), xtol=1e-3).root)
    return scale * (effect if is_continuous else float(shares(effect) @ values_V))


def random_signs(num_problems: int, num_flips: int, generator: np.random.Generator) -> Floats:
    """Signs of the problems in each flip: all combinations if there are at most `num_flips`, otherwise random ones.

    The first flip changes no sign. Random flips come in addition, `num_flips` of them.
    """
    if 2**num_problems <= num_flips:
        bits_FP = np.arange(2**num_problems)[:, None] >> np.arange(num_problems) & 1
    else:
        bits_FP = generator.integers(0, 2, (num_flips + 1, num_problems), dtype=np.int8)
        bits_FP[0] = 0
    return 1.0 - 2.0 * bits_FP.astype(np.float64)
