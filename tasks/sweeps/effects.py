"""Effect of each regularizer on each metric of a sweep: one linear fit over all completed trials."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from tasks.sweeps.store import Trial
from tasks.sweeps.table import CONFIDENCE, PointRow, dimensions

TRAINED, TENFOLD = "trained", "weight x10"


@dataclass(frozen=True, slots=True)
class Effect:
    """Change of a metric when a regularizer is trained, or when its weight grows tenfold.

    Attributes:
        regularizer: name of the regularizer.
        change: `TRAINED` or `TENFOLD`.
        metric: metric that changes.
        estimate: estimated change; NaN if the trials cannot separate it from another effect.
        half_width: half width of its 95 % interval; NaN with as many unknowns as trials.
    """

    regularizer: str
    change: str
    metric: str
    estimate: float
    half_width: float


def reported_metrics(rows: Sequence[PointRow], metric: str, terms: Sequence[str]) -> list[str]:
    """Metrics of the report: the sweep's own, evaluation metrics, the base loss and each term's value."""
    logged = {key for row in rows for trial in row.completed for key in trial.metrics}
    evaluated = sorted(key for key in logged if key.startswith("test/") and not key.endswith("/stderr"))
    keys = [metric, *evaluated, "loss/base", "train_mean_nll", *(f"term/{name}/value" for name in terms)]
    return [key for key in dict.fromkeys(keys) if key in logged]


def estimate_effects(
    rows: Sequence[PointRow], strengths: Mapping[int, Mapping[str, float]], metrics: Sequence[str]
) -> list[Effect]:
    """Estimate the effect on each metric of every regularizer that differs between the points.

    A least-squares fit regresses the metric on an indicator of each trained regularizer, the logarithm of its weight,
    all other dimensions of the points, and the seeds. For an ablation of one regularizer at a time, the effect is the
    difference to the point without regularizers. For all subsets, the effect is the mean difference between the
    subsets with the regularizer and the subsets without it.

    Args:
        strengths: weight of each regularizer, by point number and regularizer.
    """
    trials = [(row, trial) for row in rows for trial in row.completed]
    names = list(dict.fromkeys(name for weights in strengths.values() for name in weights))
    weights_NR = np.array([[strengths[row.point.number].get(name, 0.0) for name in names] for row, _ in trials])
    changes, columns = _regularizer_columns(names, weights_NR) if trials else ([], [])
    columns = [*columns, *_other_columns(trials)]
    effects: list[Effect] = []
    for metric in metrics if changes else ():
        has_metric_N = np.array([metric in trial.metrics for _, trial in trials])
        values_N = np.array([trial.metrics.get(metric, math.nan) for _, trial in trials])
        x_NC = np.column_stack([np.ones(len(trials)), *columns])[has_metric_N]
        estimates_C, widths_C = fit_least_squares(x_NC, values_N[has_metric_N])
        for index, (name, change) in enumerate(changes, start=1):
            effects.append(Effect(name, change, metric, estimates_C[index], widths_C[index]))
    return effects


# Dimensions of the weights of the measured run, which for `rlhf` is the policy stage.
_STRENGTH = re.compile(r"(policy\.training\.)?objective\.regularizers\.[^.]+\.(weight|enabled)(\.|$)")


def fit_least_squares(x_NC: np.ndarray, y_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit ``y = x @ coefficients``; return the coefficients and half widths of their intervals, each ``(C,)``.

    Undetermined values are NaN.
    """
    num_rows, num_columns = x_NC.shape
    undetermined_C = np.full(num_columns, math.nan)
    if num_rows == 0:
        return undetermined_C, undetermined_C
    inverse_CN = np.linalg.pinv(x_NC)
    coefficients_C = inverse_CN @ y_N
    # A coefficient is determined if its axis lies in the row space.
    determined_C = np.isclose(np.diag(inverse_CN @ x_NC), 1.0, atol=1e-6)
    num_free = num_rows - np.linalg.matrix_rank(x_NC)
    widths_C = undetermined_C
    if num_free > 0:
        variance = float(((y_N - x_NC @ coefficients_C) ** 2).sum()) / num_free
        widths_C = stdtrit(num_free, (1 + CONFIDENCE) / 2) * np.sqrt(variance * (inverse_CN**2).sum(axis=1))
    return np.where(determined_C, coefficients_C, math.nan), np.where(determined_C, widths_C, math.nan)


def _regularizer_columns(
    names: Sequence[str], weights_NR: np.ndarray
) -> tuple[list[tuple[str, str]], list[np.ndarray]]:
    """Regularizer and kind of change of each column, and the columns, each ``(N,)``."""
    changes: list[tuple[str, str]] = []
    columns: list[np.ndarray] = []
    for name, weights_N in zip(names, weights_NR.T, strict=True):
        trained_N = weights_N > 0
        if trained_N.any() and not trained_N.all():
            changes.append((name, TRAINED))
            columns.append(trained_N.astype(float))
        if len(set(weights_N[trained_N])) > 1:
            logs_N = np.log10(weights_N, where=trained_N, out=np.zeros_like(weights_N))
            changes.append((name, TENFOLD))
            # Centered, so that the effect of training is the one at the mean log weight.
            columns.append(np.where(trained_N, logs_N - logs_N[trained_N].mean(), 0.0))
    return changes, columns


def _other_columns(trials: Sequence[tuple[PointRow, Trial]]) -> list[np.ndarray]:
    """Columns of the seeds and of all dimensions except whether and how strongly regularizers are trained.

    A numeric dimension is one column, in logarithms if it spans a factor of ten. Other dimensions are indicators.
    """
    columns = _indicators([trial.seed for _, trial in trials])
    for name in dimensions([row for row, _ in trials]):
        if name == "ablation" or _STRENGTH.match(name):
            continue
        values = [row.point.values.get(name) for row, _ in trials]
        known = [value for value in values if value is not None]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
            has_value_N = np.array([value is not None for value in values])
            numbers = np.array(known, dtype=float)
            wide = numbers.min() > 0 and numbers.max() >= 10 * numbers.min()
            numbers = np.log10(numbers) if wide else numbers
            # A field of an ablated regularizer has no value; centered, so that it does not tell which trials have one.
            column = np.zeros(len(values))
            column[has_value_N] = numbers - numbers.mean()
            columns.append(column)
        else:
            columns += _indicators(values)
    return columns


def _indicators(values: Sequence[object]) -> list[np.ndarray]:
    """One indicator column per distinct value except the first."""
    return [np.array([value == level for value in values], dtype=float) for level in list(dict.fromkeys(values))[1:]]
