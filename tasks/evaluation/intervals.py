"""Intervals and tests of scores by problem. The answers to one problem are alike, so problems are the observations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

_CONFIDENCE = 0.95
_POWER = 0.8
# Sign flips of the permutation test; all 2 ** P of them if they are fewer.
_NUM_FLIPS = 9999


class Interval(NamedTuple):
    """Interval of 95 % confidence."""

    low: float
    high: float


def proportion_interval(scores_P: Sequence[float]) -> Interval | None:
    """Interval of the mean of scores from 0 to 1, one per problem; None for a single problem.

    It is Wilson's interval with the effective sample size ``p (1 - p) / v``, where ``v`` is the variance of the mean
    over problems, and the quantile of Student's t. If all scores are equal, the sample size is the number of problems.

    Source: Dean and Pagano 2015, "Evaluating Confidence Interval Methods for Binomial Proportions in Clustered
    Surveys", Journal of Survey Statistics and Methodology 3(4).

    >>> low, high = proportion_interval([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    >>> round(low, 4), round(high, 4)
    (0.5234, 0.9866)
    """
    num = len(scores_P)
    if num < 2:
        return None
    mean, variance = float(np.mean(scores_P)), float(np.var(scores_P, ddof=1)) / num
    size = mean * (1 - mean) / variance if variance > 0 else float(num)
    quantile = float(stats.t.ppf((1 + _CONFIDENCE) / 2, num - 1))
    shrinkage = quantile**2 / size
    centre = (mean + shrinkage / 2) / (1 + shrinkage)
    width = math.sqrt(shrinkage * mean * (1 - mean) + shrinkage**2 / 4) / (1 + shrinkage)
    return Interval(max(centre - width, 0.0), min(centre + width, 1.0))


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean difference of scores of the same problems.

    Attributes:
        mean: the mean difference.
        interval: interval of Student's t over problems; None if all differences are equal.
        p_value: probability of such a mean, or a greater one, if the difference of each problem could as well have the
            opposite sign: the one-sided test of two equal policies, over all signs of up to 13 problems and over 9,999
            random ones of more.
        detectable: smallest true difference that a comparison like this finds significant, one-sided at 5 %, with a
            probability of 0.8; None if all differences are equal.
    """

    mean: float
    interval: Interval | None
    p_value: float
    detectable: float | None

    def metrics(self, name: str) -> dict[str, float]:
        """Return the figures as metrics, `difference/<name>` and so on."""
        figures = {"": self.mean, "_p_value": self.p_value}
        if self.interval is not None and self.detectable is not None:
            figures |= {"_low": self.interval.low, "_high": self.interval.high, "_detectable": self.detectable}
        return {f"difference/{name}{suffix}": value for suffix, value in figures.items()}


def compare_scores(differences_P: Sequence[float]) -> Difference:
    """Compare two policies by their differences of scores, one per problem.

    >>> compare_scores([1.0, 1.0, 1.0, 1.0]).p_value  # one of 16 sign flips
    0.0625
    """
    num, mean = len(differences_P), float(np.mean(differences_P))
    if num == 1:
        return Difference(mean, None, 0.5 if mean > 0 else 1.0, None)
    test = stats.permutation_test(
        (np.asarray(differences_P, dtype=np.float64),),
        np.mean,
        permutation_type="samples",
        alternative="greater",
        vectorized=True,
        n_resamples=_NUM_FLIPS,
        rng=np.random.default_rng(0),
    )
    p_value = float(test.pvalue)
    error = float(np.std(differences_P, ddof=1)) / math.sqrt(num)
    if error == 0:
        return Difference(mean, None, p_value, None)
    two_sided, one_sided, power = stats.t.ppf([(1 + _CONFIDENCE) / 2, _CONFIDENCE, _POWER], num - 1).tolist()
    interval = Interval(mean - two_sided * error, mean + two_sided * error)
    return Difference(mean, interval, p_value, (one_sided + power) * error)
