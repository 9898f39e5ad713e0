"""What each regularizer does to each metric of a sweep: one linear fit over all trials that completed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t

from tasks.sweep_table import CONFIDENCE, PointRow, dimensions
from tasks.trials import Trial

TRAINED, TENFOLD = "trained", "weight x10"


@dataclass(frozen=True, slots=True)
class Effect:
    """What a metric gains where a regularizer is trained, or where its weight is ten times as great.

    Attributes:
        regularizer, of: which one, and `TRAINED` or `TENFOLD`.
        metric: which one.
        estimate: NaN where the trials do not tell it apart from something else.
        half_width: of its 95 % interval; NaN where there are as many unknowns as trials.
    """

    regularizer: str
    of: str
    metric: str
    estimate: float
    half_width: float


def shown_metrics(rows: Sequence[PointRow], metric: str, terms: Sequence[str]) -> list[str]:
    """The metrics that a report is about: the sweep's own, what was evaluated, the base loss, and each term's value."""
    logged = {key for row in rows for trial in row.completed for key in trial.metrics}
    tested = sorted(key for key in logged if key.startswith("test/"))
    wanted = [metric, *tested, "loss/base", "train_mean_nll", *(f"term/{name}/value" for name in terms)]
    return [key for key in dict.fromkeys(wanted) if key in logged]


def effects(
    rows: Sequence[PointRow], strengths: Mapping[int, Mapping[str, float]], metrics: Sequence[str]
) -> list[Effect]:
    """The effects of all regularizers that differ between the points, on each metric.

    A fit by least squares of the metric on: whether each regularizer trains, the logarithm of its weight, whatever else
    the points differ in, and the seeds. In an ablation of one at a time that is the difference to the point without
    any; over all subsets, the mean difference between the subsets with it and those without.

    Args:
        strengths: the weight of each regularizer at each point, by its number.
    """
    trials = [(row, trial) for row in rows for trial in row.completed]
    names = list(dict.fromkeys(name for each in strengths.values() for name in each))
    weights_NR = np.array([[strengths[row.point.number].get(name, 0.0) for name in names] for row, _ in trials])
    wanted, columns = _regularizer_columns(names, weights_NR) if trials else ([], [])
    columns = [*columns, *_other_columns(trials)]
    found: list[Effect] = []
    for metric in metrics if wanted else ():
        there = np.array([metric in trial.metrics for _, trial in trials])
        values = np.array([trial.metrics.get(metric, math.nan) for _, trial in trials])
        x_NC = np.column_stack([np.ones(len(trials)), *columns])[there]
        estimates_C, widths_C = fit(x_NC, values[there])
        for index, (name, of) in enumerate(wanted, start=1):
            found.append(Effect(name, of, metric, estimates_C[index], widths_C[index]))
    return found


def fit(x_NC: np.ndarray, y_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least squares: the coefficients and the half widths of their intervals, NaN where they are not determined."""
    num_rows, num_columns = x_NC.shape
    nothing = np.full(num_columns, math.nan)
    if num_rows == 0:
        return nothing, nothing
    inverse_CN = np.linalg.pinv(x_NC)
    coefficients_C = inverse_CN @ y_N
    # A coefficient is determined where its axis lies in the row space.
    determined_C = np.isclose(np.diag(inverse_CN @ x_NC), 1.0, atol=1e-6)
    num_free = num_rows - np.linalg.matrix_rank(x_NC)
    widths_C = nothing
    if num_free > 0:
        variance = float(((y_N - x_NC @ coefficients_C) ** 2).sum()) / num_free
        widths_C = t.ppf((1 + CONFIDENCE) / 2, num_free) * np.sqrt(variance * (inverse_CN**2).sum(axis=1))
    return np.where(determined_C, coefficients_C, math.nan), np.where(determined_C, widths_C, math.nan)


def _regularizer_columns(
    names: Sequence[str], weights_NR: np.ndarray
) -> tuple[list[tuple[str, str]], list[np.ndarray]]:
    wanted: list[tuple[str, str]] = []
    columns: list[np.ndarray] = []
    for name, weights_N in zip(names, weights_NR.T, strict=True):
        trained_N = weights_N > 0
        if trained_N.any() and not trained_N.all():
            wanted.append((name, TRAINED))
            columns.append(trained_N.astype(float))
        if len(set(weights_N[trained_N])) > 1:
            logs_N = np.log10(weights_N, where=trained_N, out=np.zeros_like(weights_N))
            wanted.append((name, TENFOLD))
            # About its mean, so that "trained" is at a weight in the middle.
            columns.append(np.where(trained_N, logs_N - logs_N[trained_N].mean(), 0.0))
    return wanted, columns


def _other_columns(trials: Sequence[tuple[PointRow, Trial]]) -> list[np.ndarray]:
    """What else differs: a number as it is, or its logarithm where it spans a factor of ten; any other by its value."""
    columns = _indicators([trial.seed for _, trial in trials])
    for name in dimensions([row for row, _ in trials]):
        if name == "ablation" or (
            name.startswith("objective.regularizers.") and name.endswith((".weight", ".enabled"))
        ):
            continue  # a regularizer's
        values = [row.point.values.get(name) for row, _ in trials]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            numbers = np.array(values, dtype=float)
            wide = numbers.min() > 0 and numbers.max() >= 10 * numbers.min()
            columns.append(np.log10(numbers) if wide else numbers)
        else:
            columns += _indicators(values)
    return columns


def _indicators(values: Sequence[object]) -> list[np.ndarray]:
    """A column for each value but the first."""
    return [np.array([value == each for value in values], dtype=float) for each in list(dict.fromkeys(values))[1:]]
