"""The metrics of graded answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blocks.errors import ConfigError
from tasks.graders import pass_at


@dataclass(frozen=True, slots=True)
class Graded:
    """One graded answer; `timed_out` where it was run and had no end."""

    right: bool
    truncated: bool
    timed_out: bool = False


def summarize(name: str, graded_PG: Sequence[Sequence[Graded]], ks: Sequence[int]) -> dict[str, float]:
    """`test/<name>`, its standard error over problems, what was cut off or had no end, and the chance of one in k.

    >>> right, wrong = Graded(True, False), Graded(False, True)
    >>> metrics = summarize("m", [[right, wrong], [wrong, wrong]], [2])
    >>> metrics["test/m"], metrics["test/m_pass_at_2"], metrics["test/m_truncated"]
    (0.25, 0.5, 0.75)
    """
    right_P = [np.mean([each.right for each in graded_G]) for graded_G in graded_PG]
    every = [each for graded_G in graded_PG for each in graded_G]
    error = float(np.std(right_P, ddof=1)) / math.sqrt(len(right_P)) if len(right_P) > 1 else 0.0
    metrics = {
        f"test/{name}": float(np.mean(right_P)),
        f"test/{name}_stderr": error,
        f"test/{name}_truncated": float(np.mean([each.truncated for each in every])),
        f"test/{name}_timed_out": float(np.mean([each.timed_out for each in every])),
    }
    for k in ks:
        chances = [pass_at(k, len(graded_G), sum(each.right for each in graded_G)) for graded_G in graded_PG]
        metrics[f"test/{name}_pass_at_{k}"] = float(np.mean(chances))
    return metrics


def check_pass_at(ks: Sequence[int], num_samples: int) -> tuple[int, ...]:
    """The k of pass_at.

    Raises:
        ConfigError: one of them is not from 1 to the number of samples.
    """
    if wrong := [k for k in ks if not 1 <= k <= num_samples]:
        raise ConfigError(f"pass_at has {wrong[0]}, and num_samples is {num_samples}: k is from 1 to num_samples.")
    return tuple(ks)
