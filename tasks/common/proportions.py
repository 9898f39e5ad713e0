"""Confidence intervals of shares, such as an accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """Confidence interval."""

    low: float
    high: float


def proportion_interval(scores_P: Sequence[float], weights_P: Sequence[float] = ()) -> Interval | None:
    """95 % confidence interval of the mean of scores from 0 to 1, one per problem or group of problems.

    None for fewer than two scores.

    This is Wilson's interval with the effective sample size ``p (1 - p) / v``, where ``v`` is the variance of the mean
    over problems, and the quantile of Student's t. If all scores are equal, the sample size is the number of problems.
    The interval contains the mean.

    Args:
        weights_P: number of problems of each score, if a score is the mean over a group of problems; empty for one
            problem each.

    Source: Dean and Pagano 2015, "Evaluating Confidence Interval Methods for Binomial Proportions in Clustered
    Surveys", Journal of Survey Statistics and Methodology 3(4).

    >>> low, high = proportion_interval([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    >>> round(low, 4), round(high, 4)
    (0.5234, 0.9866)
    """
    num = len(scores_P)
    if num < 2:
        return None
    weights = np.array(weights_P or [1] * num, dtype=float)
    if len(set(scores_P)) < 2:
        mean, size = scores_P[0], float(weights.sum())
    else:
        shares, scores = weights / weights.sum(), np.array(scores_P)
        mean = float(shares @ scores)
        size = mean * (1 - mean) / (float(shares**2 @ (scores - mean) ** 2) * num / (num - 1))
    quantile = t_quantile(num - 1, (1 + CONFIDENCE) / 2)
    shrinkage = quantile**2 / size
    centre = (mean + shrinkage / 2) / (1 + shrinkage)
    half_width = math.sqrt(shrinkage * mean * (1 - mean) + shrinkage**2 / 4) / (1 + shrinkage)
    return Interval(min(max(centre - half_width, 0.0), mean), max(min(centre + half_width, 1.0), mean))


def t_quantile(num_free: int, probability: float) -> float:
    """Quantile of Student's t with ``num_free`` degrees of freedom.

    >>> round(t_quantile(9, 0.975), 3)
    2.262
    """
    from scipy.special import stdtrit  # takes a tenth of a second to import, and training needs no intervals

    return float(stdtrit(num_free, probability))
