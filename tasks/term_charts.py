"""Drawings of a run's terms, from the history of its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

History = Mapping[str, Sequence[tuple[int, float]]]


def draw_terms(history: History, terms: Sequence[str]) -> Figure:
    """The loss, and each term's value, share of the gradient and cosine to the base, over the steps."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    colors = _colors(terms)
    losses = {"train": "train_mean_nll", "test": "test/nll"}
    _lines(axes[0, 0], history, losses, "Mean NLL (nats per token)", {})
    regularizers = [name for name in terms if name != "base"]
    _lines(
        axes[0, 1],
        history,
        {name: f"term/{name}/value" for name in regularizers},
        "Value of each regularizer",
        colors,
    )
    _lines(axes[1, 0], history, {name: f"term/{name}/grad_share" for name in terms}, "Share of the gradient", colors)
    _lines(
        axes[1, 1],
        history,
        {name: f"term/{name}/cosine_to_base" for name in regularizers},
        "Cosine to the base",
        colors,
    )
    axes[1, 0].set_ylim(0, 1)
    axes[1, 1].axhline(0, color="0.6", linewidth=0.8)
    return figure


def draw_contributions(history: History, terms: Sequence[str]) -> Figure:
    """What each term adds to the loss, on top of each other; what takes away hangs below zero."""
    return _stacked(history, terms, "contribution", "Contribution to the loss, weight times value")


def draw_shares(history: History, terms: Sequence[str]) -> Figure:
    """Each term's share of the gradient, on top of each other."""
    return _stacked(history, terms, "grad_share", "Share of the gradient")


def draw_conflicts(history: History, terms: Sequence[str]) -> Figure:
    """The mean cosine of each two terms' gradients over the steps: red pulls against each other."""
    cosines_KK = mean_cosines(history, terms)
    size = max(4.0, 1.5 + 0.8 * len(terms))
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.subplots()
    drawn = axes.imshow(cosines_KK, cmap="RdBu", vmin=-1, vmax=1)
    axes.set_xticks(range(len(terms)), terms, rotation=45, ha="right")
    axes.set_yticks(range(len(terms)), terms)
    for (i, j), cosine in np.ndenumerate(cosines_KK):
        if np.isfinite(cosine):
            axes.text(j, i, f"{cosine:+.2f}", ha="center", va="center", color="white" if abs(cosine) > 0.6 else "black")
    axes.set_title("Mean cosine of the gradients")
    figure.colorbar(drawn, ax=axes, shrink=0.8)
    return figure


def mean_cosines(history: History, terms: Sequence[str]) -> np.ndarray:
    """The mean over the steps of the cosine of each two terms: ``(K, K)``; NaN where they never met."""
    cosines_KK = np.full((len(terms), len(terms)), np.nan)
    np.fill_diagonal(cosines_KK, 1.0)
    for i, first in enumerate(terms):
        for j, second in enumerate(terms):
            points = history.get(cosine_key(first, second)) or history.get(cosine_key(second, first)) or ()
            if i != j and points:
                cosines_KK[i, j] = np.mean([value for _, value in points])
    return cosines_KK


def cosine_key(first: str, second: str) -> str:
    """The metric of the cosine of two terms, in one of the two orders."""
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
    return {name: f"C{index}" for index, name in enumerate(terms)}  # a term looks the same in every drawing


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
