"""Charts of a sweep: effects, Pareto fronts, maps of pairs of dimensions, parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.sweeps.effects import Effect
from tasks.sweeps.table import PointRow, dimensions, short_name

_MAX_MAPS = 6
_MAX_BINS = 6


def draw_effects(effects: Sequence[Effect], spreads: Mapping[str, float]) -> Figure:
    """Heat map of each regularizer's effect on each metric, in standard deviations of the metric over the trials.

    Args:
        spreads: standard deviation of each metric; metrics that do not vary are left out.
    """
    rows = list(dict.fromkeys((effect.regularizer, effect.change) for effect in effects))
    metrics = [metric for metric in dict.fromkeys(effect.metric for effect in effects) if spreads.get(metric)]
    estimates = {(effect.regularizer, effect.change, effect.metric): effect.estimate for effect in effects}
    scaled = np.full((len(rows), len(metrics)), math.nan)
    for (i, row), (j, metric) in ((a, b) for a in enumerate(rows) for b in enumerate(metrics)):
        scaled[i, j] = estimates[*row, metric] / spreads[metric]
    figure = Figure(figsize=(3 + 1.3 * max(len(metrics), 3), 1.8 + 0.55 * max(len(rows), 2)), layout="constrained")
    axes = figure.subplots()
    limit = float(np.nanmax(np.abs(scaled))) if np.isfinite(scaled).any() else 1.0
    image = axes.imshow(scaled, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    axes.set_xticks(range(len(metrics)), metrics, rotation=30, ha="right")
    axes.set_yticks(range(len(rows)), [f"{name}: {change}" for name, change in rows])
    for (i, j), value in np.ndenumerate(scaled):
        if np.isfinite(value):
            color = "white" if abs(value) > 0.6 * limit else "black"
            axes.text(j, i, f"{estimates[*rows[i], metrics[j]]:+.3g}", ha="center", va="center", color=color)
    axes.set_title("Effect of each regularizer on each metric")
    figure.colorbar(image, ax=axes, label="standard deviations", shrink=0.8)
    return figure


def draw_pareto(rows: Sequence[PointRow], base: str, terms: Sequence[str]) -> Figure:
    """Scatter plots of the base loss against each term's value, with the Pareto front."""
    figure = Figure(figsize=(5.2 * min(len(terms), 3), 4.2 * math.ceil(len(terms) / 3)), layout="constrained")
    grid = figure.subplots(math.ceil(len(terms) / 3), min(len(terms), 3), squeeze=False)
    for axes in grid.flat[len(terms) :]:
        axes.set_visible(False)
    for axes, term in zip(grid.flat, terms, strict=False):
        key = f"term/{term}/value"
        points = [(row.mean_of(base), row.mean_of(key), row.point.number) for row in rows if row.completed]
        points = [point for point in points if all(map(math.isfinite, point))]
        front = pareto_front([point[:2] for point in points])
        axes.scatter([x for x, _, _ in points], [y for _, y, _ in points], color="0.6", s=25)
        best = sorted(point for point, is_best in zip(points, front, strict=True) if is_best)
        axes.plot([x for x, _, _ in best], [y for _, y, _ in best], "o-", color="C3", label="Pareto front")
        for x, y, number in best:
            axes.annotate(str(number), (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
        axes.set_xlabel(base)
        axes.set_ylabel(key)
        axes.grid(alpha=0.3)
        if best:
            axes.legend()
    return figure


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Mark the points on the Pareto front: no other point is as small in both coordinates and smaller in one.

    >>> pareto_front([(1.0, 3.0), (2.0, 2.0), (2.0, 3.0), (3.0, 1.0)])
    [True, True, False, True]
    """
    return [not any(x <= a and y <= b and (x < a or y < b) for x, y in points) for a, b in points]


def draw_maps(rows: Sequence[PointRow], metric: str) -> Figure:
    """Heat maps of the metric over the first pairs of dimensions, at most six, averaged over all other dimensions."""
    names = dimensions(rows)
    pairs = list(combinations(names, 2))[:_MAX_MAPS]
    columns = min(len(pairs), 3)
    figure = Figure(figsize=(5.2 * columns, 4.2 * math.ceil(len(pairs) / columns)), layout="constrained")
    grid = figure.subplots(math.ceil(len(pairs) / columns), columns, squeeze=False)
    for axes in grid.flat[len(pairs) :]:
        axes.set_visible(False)
    for axes, (a, b) in zip(grid.flat, pairs, strict=False):
        present = [row for row in rows if row.mean is not None and a in row.point.values and b in row.point.values]
        _draw_map(figure, axes, present, (a, b), (short_name(a, names), short_name(b, names)), metric)
    return figure


def draw_parallel(rows: Sequence[PointRow], metric: str, mode: Literal["min", "max"]) -> Figure:
    """Parallel coordinates: one line per point across its dimensions and its metric; the best is darkest and on top.

    Args:
        rows: points, the best first.
    """
    names = dimensions(rows)
    present = [row for row in rows if row.mean is not None]
    figure = Figure(figsize=(2.2 * max(len(names) + 1, 3), 4.6), layout="constrained")
    axes = figure.subplots()
    heights = {name: _heights([row.point.values.get(name) for row in present]) for name in names}
    means = np.array([row.mean for row in present], dtype=float)
    spread = float(np.ptp(means)) if len(means) else 0.0
    ranks = (means - means.min()) / spread if spread else np.zeros(len(means))
    colors = colormaps["viridis"](ranks if mode == "min" else 1 - ranks)
    for index in reversed(range(len(present))):
        ys = [heights[name][0][index] for name in names] + [ranks[index]]
        axes.plot(range(len(ys)), ys, color=colors[index], alpha=0.8, linewidth=2.5 if index == 0 else 1.2)
    for x, name in enumerate(names):
        axes.axvline(x, color="0.5", linewidth=0.8)
        for height, text in heights[name][1]:
            axes.text(x + 0.03, height, text, fontsize=8, va="center")
    axes.axvline(len(names), color="0.5", linewidth=0.8)
    for height in (0.0, 1.0) if spread else ():
        axes.text(len(names) + 0.03, height, f"{means.min() + height * spread:.4g}", fontsize=8, va="center")
    axes.set_xticks(range(len(names) + 1), [*(short_name(name, names) for name in names), metric])
    axes.set_yticks([])
    axes.set_xlim(-0.1, len(names) + 0.3)
    return figure


def _draw_map(
    figure: Figure,
    axes: Axes,
    rows: Sequence[PointRow],
    pair: tuple[str, str],
    labels: tuple[str, str],
    metric: str,
) -> None:
    (x_of, x_labels), (y_of, y_labels) = (_bins([row.point.values[name] for row in rows]) for name in pair)
    sums = np.zeros((len(y_labels), len(x_labels)))
    counts = np.zeros_like(sums)
    for row, x, y in zip(rows, x_of, y_of, strict=True):
        sums[y, x] += row.mean or 0.0
        counts[y, x] += 1
    means = np.divide(sums, counts, where=counts > 0, out=np.full_like(sums, math.nan))
    image = axes.imshow(means, cmap="viridis_r", origin="lower", aspect="auto")
    axes.set_xticks(range(len(x_labels)), x_labels, rotation=30, ha="right")
    axes.set_yticks(range(len(y_labels)), y_labels)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    middle = (np.nanmin(means) + np.nanmax(means)) / 2 if np.isfinite(means).any() else 0.0
    for (y, x), value in np.ndenumerate(means):
        if np.isfinite(value):
            color = "white" if value > middle else "black"
            axes.text(x, y, f"{value:.3f}", ha="center", va="center", fontsize=8, color=color)
    figure.colorbar(image, ax=axes, label=metric, shrink=0.8)


def _bins(values: Sequence[object]) -> tuple[list[int], list[str]]:
    """Bin index of each value, and the labels of the bins; many distinct numbers share quantile bins."""
    levels = _distinct(values)
    if len(levels) <= _MAX_BINS or not _are_numbers(levels):
        return [levels.index(value) for value in values], [_text(level) for level in levels]
    numbers = np.array(values, dtype=float)
    edges = np.quantile(numbers, np.linspace(0, 1, _MAX_BINS + 1))
    bins = np.clip(np.searchsorted(edges, numbers, side="right") - 1, 0, _MAX_BINS - 1)
    return bins.tolist(), [f"{low:.2g} to {high:.2g}" for low, high in pairwise(edges)]


def _heights(values: Sequence[object]) -> tuple[list[float], list[tuple[float, str]]]:
    """Height of each value on a dimension's axis from 0 to 1, and the axis labels with their heights.

    A missing value is at 0.5.
    """
    levels = _distinct([value for value in values if value is not None])
    if _are_numbers(levels) and len(levels) > _MAX_BINS:
        numbers = np.array(levels, dtype=float)
        logarithmic = numbers[0] > 0 and numbers[-1] >= 10 * numbers[0]
        scaled = np.log(numbers) if logarithmic else numbers
        heights = ((scaled - scaled[0]) / (scaled[-1] - scaled[0])).tolist()
        labels = [(0.0, _text(levels[0])), (1.0, _text(levels[-1]))]
    else:
        heights = [index / max(1, len(levels) - 1) for index in range(len(levels))]
        labels = [(height, _text(level)) for height, level in zip(heights, levels, strict=True)]
    height_of = dict(zip(levels, heights, strict=True))
    return [0.5 if value is None else height_of[value] for value in values], labels


def _distinct(values: Sequence[object]) -> list[object]:
    """Distinct values: numbers in ascending order, others in order of first appearance."""
    levels = list(dict.fromkeys(values))
    return sorted(levels, key=float) if _are_numbers(levels) else levels  # type: ignore[arg-type]


def _are_numbers(values: Sequence[object]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _text(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    text = text if len(text) <= 24 else f"{text[:23]}…"
    return text.replace("$", r"\$")  # matplotlib would read two dollar signs as a formula
