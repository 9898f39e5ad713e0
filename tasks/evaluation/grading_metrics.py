"""Metrics of graded answers, and scores of each problem."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from blocks.errors import ConfigError
from tasks.common.graders import pass_at
from tasks.common.proportions import proportion_interval
from tasks.training.held_out import GradedMetrics

_DIGEST_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Graded:
    """Grade of one answer.

    Attributes:
        right: the answer is correct.
        truncated: the answer reached the token limit.
        timed_out: the answer's code reached the time limit.
    """

    right: bool
    truncated: bool
    timed_out: bool = False


def digest_problems(problems: Iterable[str]) -> str:
    """Compute the digest of the texts or IDs of problems."""
    return hashlib.sha256("\0".join(problems).encode(errors="surrogatepass")).hexdigest()[:_DIGEST_LENGTH]


def scores_by_problem(name: str, graded_PG: Sequence[Sequence[Graded]], ks: Sequence[int]) -> dict[str, list[float]]:
    """Return scores of each problem, from 0 to 1.

    They are the share of right answers, as `test/<name>`, and pass@k, as `test/<name>_pass_at_<k>`. See `summarize` for
    the arguments.
    """
    right_PG = [[graded.right for graded in graded_G] for graded_G in graded_PG]
    scores = {f"test/{name}": [float(np.mean(right_G)) for right_G in right_PG]}
    for k in ks:
        scores[f"test/{name}_pass_at_{k}"] = [pass_at(k, len(right_G), sum(right_G)) for right_G in right_PG]
    return scores


def summarize(name: str, graded_PG: Sequence[Sequence[Graded]], ks: Sequence[int], problems: str = "") -> GradedMetrics:
    """Accuracy `test/<name>`, its standard error over problems, shares of truncated and timed-out answers, and pass@k.

    A single problem has no standard error. With several, each pass@k also has a 95 % confidence interval, `_low` and
    `_high`.

    Args:
        graded_PG: grades by problem and answer.
        ks: values of k for pass@k.
        problems: digest of the problems.

    >>> right, wrong = Graded(True, False), Graded(False, True)
    >>> metrics = summarize("m", [[right, wrong], [wrong, wrong]], [2])
    >>> metrics["test/m"], metrics["test/m_pass_at_2"], metrics["test/m_truncated"]
    (0.25, 0.5, 0.75)
    """
    scores = scores_by_problem(name, graded_PG, ks)
    right_P = scores[f"test/{name}"]
    grades = [graded for graded_G in graded_PG for graded in graded_G]
    metrics = {
        f"test/{name}": float(np.mean(right_P)),
        f"test/{name}_truncated": float(np.mean([graded.truncated for graded in grades])),
        f"test/{name}_timed_out": float(np.mean([graded.timed_out for graded in grades])),
    }
    if len(right_P) > 1:
        metrics[f"test/{name}_stderr"] = float(np.std(right_P, ddof=1)) / math.sqrt(len(right_P))
    for k in ks:
        key = f"test/{name}_pass_at_{k}"
        metrics[key] = float(np.mean(scores[key]))
        if interval := proportion_interval(scores[key]):
            metrics |= {f"{key}_low": interval.low, f"{key}_high": interval.high}
    return GradedMetrics(metrics, scores, problems)


def check_pass_at(ks: Sequence[int], num_samples: int) -> tuple[int, ...]:
    """Validate the values of k for pass@k.

    Raises:
        ConfigError: a value is not between 1 and the number of samples.
    """
    if invalid := [k for k in ks if not 1 <= k <= num_samples]:
        raise ConfigError(
            f"pass_at has {invalid[0]}, but num_samples is {num_samples}: use values from 1 to num_samples."
        )
    return tuple(ks)
