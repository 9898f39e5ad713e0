"""Charts of a run's terms over its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

History = Mapping[str, Sequence[tuple[int, float]]]


def draw_terms(history: History, terms: Sequence[str]) -> Figure:
    """Line charts of the loss and of each term's values, share of the gradient and cosine to the base."""
    figure = Figure(figsize=(12, 12), layout="constrained")
    axes = figure.subplots(3, 2)
    colors = _colors(terms)
    losses = {"train": "train_mean_nll", "test": "test/nll"}
    _lines(axes[0, 0], history, losses, "Mean NLL (nats per token)", {})
    regularizers = [name for name in terms if name != "base"]
    _lines(
        axes[0, 1],
        history,
        {name: f"term/{name}/value" for name in regularizers},
        "Value of each regularizer on training batches",
        colors,
    )
    _held_out_values(axes[1, 0], history, regularizers, colors)
    _lines(
        axes[1, 1],
        history,
        {name: f"term/{name}/effect" for name in regularizers},
        "Effect of the update on each value",
        colors,
    )
    _lines(axes[2, 0], history, {name: f"term/{name}/grad_share" for name in terms}, "Share of the gradient", colors)
    _lines(
        axes[2, 1],
        history,
        {name: f"term/{name}/cosine_to_base" for name in regularizers},
        "Cosine to the base",
        colors,
    )
    axes[2, 0].set_ylim(0, 1)
    for panel in (axes[1, 1], axes[2, 1]):
        panel.axhline(0, color="0.6", linewidth=0.8)
    return figure


def draw_targets(history: History, limits: Mapping[str, float]) -> Figure:
    """Value and limit of each term with a target above its multiplier, one column per term."""
    figure = Figure(figsize=(4.5 * len(limits) + 1, 6), layout="constrained")
    grid = figure.subplots(2, len(limits), squeeze=False, sharex="col")
    for (top, bottom), (name, limit) in zip(grid.T, limits.items(), strict=True):
        _lines(top, history, {"value": f"term/{name}/value"}, name, {})
        top.axhline(limit, color="0.4", linestyle="--", label="limit")
        top.legend()
        _lines(bottom, history, {"multiplier": f"term/{name}/multiplier"}, f"Multiplier of {name}", {})
    return figure


def draw_contributions(history: History, terms: Sequence[str]) -> Figure:
    """Stacked chart of each term's contribution to the loss; negative contributions stack below zero."""
    return _stacked(history, terms, "contribution", "Contribution to the loss, weight times value")


def draw_shares(history: History, terms: Sequence[str]) -> Figure:
    """Stacked chart of each term's share of the gradient."""
    return _stacked(history, terms, "grad_share", "Share of the gradient")


def draw_conflicts(history: History, terms: Sequence[str]) -> Figure:
    """Heat map of the mean cosine of each pair of gradients; red marks terms that pull against each other."""
    cosines_KK = mean_cosines(history, terms)
    size = max(4.0, 1.5 + 0.8 * len(terms))
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(cosines_KK, cmap="RdBu", vmin=-1, vmax=1)
    axes.set_xticks(range(len(terms)), terms, rotation=45, ha="right")
    axes.set_yticks(range(len(terms)), terms)
    for (i, j), cosine in np.ndenumerate(cosines_KK):
        if np.isfinite(cosine):
            axes.text(j, i, f"{cosine:+.2f}", ha="center", va="center", color="white" if abs(cosine) > 0.6 else "black")
    axes.set_title("Mean cosine of the gradients")
    figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def mean_cosines(history: History, terms: Sequence[str]) -> np.ndarray:
    """Mean cosine of each pair of terms over the steps, ``(K, K)``; NaN for pairs without a common step."""
    cosines_KK = np.full((len(terms), len(terms)), np.nan)
    np.fill_diagonal(cosines_KK, 1.0)
    for i, first in enumerate(terms):
        for j, second in enumerate(terms):
            points = history.get(cosine_key(first, second)) or history.get(cosine_key(second, first)) or ()
            if i != j and points:
                cosines_KK[i, j] = np.mean([value for _, value in points])
    return cosines_KK


def cosine_key(first: str, second: str) -> str:
    """Metric key of the cosine of two terms; the run logs it for one of the two orders."""
    return f"term/{second}/cosine_to_base" if first == "base" else f"cosine/{first}/{second}"


def _stacked(history: History, terms: Sequence[str], field: str, title: str) -> Figure:
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    series = {name: dict(history.get(f"term/{name}/{field}", ())) for name in terms}
    colors = _colors(terms)
    steps = sorted({step for points in series.values() for step in points})
    edges = [*(step - 0.5 for step in steps), *(step + 0.5 for step in steps[-1:])]
    top, bottom = np.zeros(len(steps)), np.zeros(len(steps))
    for name, points in series.items() if steps else ():
        values = np.array([points.get(step, 0.0) for step in steps])
        above, below = top + values.clip(min=0), bottom + values.clip(max=0)
        axes.stairs(above, edges, baseline=top, fill=True, label=name, color=colors[name])
        axes.stairs(below, edges, baseline=bottom, fill=True, color=colors[name])
        top, bottom = above, below
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if steps:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _colors(terms: Sequence[str]) -> dict[str, str]:
    return {name: f"C{index}" for index, name in enumerate(terms)}  # same color for a term in every chart


def _held_out_values(axes: Axes, history: History, names: Sequence[str], colors: Mapping[str, str]) -> None:
    """Values on the held-out data, with bars of two standard errors."""
    for name in names:
        points = dict(history.get(f"test/term/{name}/value", ()))
        errors = dict(history.get(f"test/term/{name}/stderr", ()))
        if points:
            bars = [2 * errors.get(step, 0.0) for step in points]
            axes.errorbar(
                list(points), list(points.values()), bars, label=name, marker=".", capsize=2, color=colors.get(name)
            )
    axes.set_title("Value of each regularizer on held-out data, ± 2 standard errors")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()


def _lines(axes: Axes, history: History, keys: Mapping[str, str], title: str, colors: Mapping[str, str]) -> None:
    for label, key in keys.items():
        points = history.get(key, ())
        if points:
            marker = "." if len(points) < 40 else None
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, color=colors.get(label))
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
