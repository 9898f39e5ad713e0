"""Comparison of several policies with the best of them, chosen on the same scores."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tasks.evaluation.intervals import (
    LEVEL,
    NUM_FLIPS,
    Difference,
    Floats,
    difference_interval,
    num_problems_needed,
    random_signs,
    smallest_detectable,
)

_MAX_SIMULATED = 1000


def compare_with_first(scores_KP: Floats) -> list[Difference]:
    """Compare the first of K policies, which is the best, with each of the others by their scores on P problems.

    The statistic of a pair is the sum of its differences divided by the root of their sum of squares. Its p-value is
    the probability that, among K equally good policies, some pair has a statistic at least as large, in either
    direction. The distribution of the largest statistic comes from random sign flips; a flip changes the sign of a
    problem's differences for all pairs. The intervals hold for all pairs at once (Bonferroni), and therefore also for
    the pairs with the policy that was selected as the best. `detectable` is the smallest true difference that this test
    finds with a probability of 0.8.

    Source: Westfall and Young 1993, "Resampling-Based Multiple Testing", single-step maxT.

    >>> scores_KP = np.array([[1.0] * 6, [0.0] * 6])  # 2 of the 64 flips are as extreme
    >>> [difference.p_value for difference in compare_with_first(scores_KP)]
    [0.03125]
    """
    # F sign flips, R simulated comparisons.
    num_pairs, num_problems = math.comb(len(scores_KP), 2), scores_KP.shape[1]
    signs_FP = random_signs(num_problems, NUM_FLIPS, np.random.default_rng(0))
    largest_F = np.sort(_largest_statistics(scores_KP, signs_FP))
    # With few differing scores, the statistics have gaps. The critical value is in the middle of the gap between the
    # largest insignificant and the smallest significant statistic.
    insignificant = largest_F[len(largest_F) - 1 - math.floor(LEVEL * len(largest_F) + 1e-9)]
    significant = largest_F[largest_F > insignificant + 1e-9]
    greatest = math.sqrt(num_problems)  # reached if all differences are equal
    critical = (insignificant + (significant[0] if len(significant) else greatest)) / 2

    def is_significant(differences_RP: Floats) -> NDArray[np.bool_]:
        """Return whether the first policy, which is the best, is significantly better."""
        return _statistic(differences_RP) > critical

    # LEVEL / 2: flipping every sign and flipping none give the same statistic, so the smallest p-value is 2 / 2^P.
    can_be_significant = num_problems >= num_problems_needed(LEVEL / 2) and critical < greatest - 1e-3
    compared: list[Difference] = []
    for differences_P in scores_KP[0] - scores_KP[1:]:
        num_smaller = np.searchsorted(largest_F, _statistic(differences_P) - 1e-9)
        compared.append(
            Difference(
                float(differences_P.mean()),
                difference_interval([*differences_P], 1 - LEVEL / num_pairs),
                float(1 - num_smaller / len(largest_F)),
                smallest_detectable([*differences_P], is_significant, _MAX_SIMULATED) if can_be_significant else None,
            )
        )
    return compared


def _largest_statistics(scores_KP: Floats, signs_FP: Floats) -> Floats:
    """Greatest statistic of all pairs, for each flip of signs."""
    sums_FK, largest_F = signs_FP @ scores_KP.T, np.zeros(len(signs_FP))
    for k in range(1, len(scores_KP)):
        norms_K = np.sqrt(((scores_KP[:k] - scores_KP[k]) ** 2).sum(axis=1))
        differences_FK = np.abs(sums_FK[:, :k] - sums_FK[:, k : k + 1])[:, norms_K > 0]
        largest_F = np.maximum(largest_F, (differences_FK / norms_K[norms_K > 0]).max(axis=1, initial=0.0))
    return largest_F


def _statistic(differences_P: Floats) -> Floats:
    """Sum over the last axis, divided by the root of the sum of squares; 0 if all differences are 0."""
    norm = np.sqrt((differences_P**2).sum(axis=-1))
    return differences_P.sum(axis=-1) / np.where(norm > 0, norm, 1.0)
