"""Interactive charts of one run or of several runs, for reports.

Colors are those of Okabe and Ito, which readers with any color vision can tell apart ("Color Universal Design", 2008).
The script of the page sets the colors of text and axes, so that they follow the reader's light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go

from objectives.term import BASE
from tasks.reports.tables import Estimate, History, cosine_key, is_share
from tasks.training.held_out import BatchValues

# Okabe and Ito's colors without yellow and black, which vanish on a light or a dark page.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
# Color of the base loss and of reference lines, readable on light and dark pages.
NEUTRAL = "#7f7f7f"
_OTHERS = "#bfbfbf"
_COSINE_COLORS = [[0.0, "#D55E00"], [0.5, "#f2f2f2"], [1.0, "#0072B2"]]

_FEWEST_TO_SMOOTH = 12
_HEIGHT_PX, _ROW_PX = 320, 130
_ROW_GAP = 0.06
# Maximum number of terms whose names and cosines fit into a heat map of half the page's width.
_MAX_NARROW = 6


@dataclass(frozen=True, slots=True)
class Chart:
    """Chart with its title and a sentence that says how to read it.

    Attributes:
        is_wide: whether it takes a whole row of the page.
    """

    title: str
    reading: str
    figure: go.Figure
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class DrawnRun:
    """Metrics of a run.

    Attributes:
        history: points (step, value) of each metric.
        batches: values of the terms on each held-out batch, by step and term.
        label: name in legends; empty if the page has a single run.
    """

    history: History
    batches: Mapping[int, Mapping[str, BatchValues]] = field(default_factory=dict)
    label: str = ""

    def held_out(self, key: str) -> dict[int, Estimate]:
        """Held-out values of a metric by step, with intervals if the run stored the values of its batches."""
        name = key.removeprefix("test/term/").removesuffix("/value")
        estimates: dict[int, Estimate] = {}
        for step, value in self.history.get(key, ()):
            batches = self.batches.get(step, {}).get(name)
            estimates[step] = Estimate.of(batches, is_share=is_share(key, self.history)) if batches else Estimate(value)
        return estimates


def term_colors(names: Sequence[str]) -> dict[str, str]:
    """Color of each term, the same in every chart of a page; the base loss is gray."""
    regularizers = [name for name in names if name != BASE]
    return {BASE: NEUTRAL} | {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(regularizers)}


def order_by_share(run: DrawnRun, names: Sequence[str]) -> list[str]:
    """Order the base loss first, then the terms by their share of the gradient over all steps, largest first."""

    def share(name: str) -> float:
        return sum(value for _, value in run.history.get(f"term/{name}/grad_share", ()))

    return sorted(names, key=lambda name: (name != BASE, -share(name)))


def draw_metric(
    runs: Sequence[DrawnRun], title: str, unit: str, reading: str, *, train: str = "", held_out: str = ""
) -> Chart | None:
    """Chart of a metric on training batches, raw and smoothed, and on held-out data; None if no run has it.

    Args:
        train: key of the metric of a training step.
        held_out: key of the metric of an evaluation.
    """
    colored = zip(runs, _run_colors(runs), strict=True)
    traces = [trace for run, color in colored for trace in _values(run, train, held_out, color)]
    return Chart(title, reading, _figure(traces, [{"title": unit}], _HEIGHT_PX)) if traces else None


def draw_term(runs: Sequence[DrawnRun], name: str, color: str = PALETTE[0], limit: float | None = None) -> Chart | None:
    """Chart of a term: its values, its weight or multiplier, and the measured effect of the updates on it.

    None if no run has values of the term.

    Args:
        color: color of the term if there is one run; with several runs, each run has a color.
        limit: limit of the term's target, drawn as a line.
    """
    rows = ("value", "weight", "multiplier", "effect")
    keys = {row: f"term/{name}/{row}" for row in rows}
    with_term = [run for run in runs if run.history.get(keys["value"])]
    has_target = bool(with_term) and all(run.history.get(keys["multiplier"]) for run in with_term)
    weights = {weight for run in runs for _, weight in run.history.get(keys["weight"], ())}
    # With a target, the multiplier shows the weight; a constant weight is named in the text below the title.
    hidden = {"weight"} if has_target or len(weights) <= 1 else set[str]()
    drawn = [row for row in rows if row not in hidden and any(run.history.get(keys[row]) for run in runs)]
    held_out = f"test/term/{name}/value"
    if "value" not in drawn:
        if not any(run.history.get(held_out) for run in runs):
            return None
        drawn.insert(0, "value")
    colors = [color] if len(runs) == 1 else _run_colors(runs)
    traces: list[dict[str, Any]] = []
    for run, run_color in zip(runs, colors, strict=True):
        traces.extend(_values(run, keys["value"], held_out, run_color))
        for index, row in enumerate(drawn[1:], start=2):
            traces.extend(_line(run.history.get(keys[row], ()), f"{row} {run.label}", run_color, row=index))
    levels = [] if limit is None else [_level(limit, dash="dash")]
    if "effect" in drawn:
        levels.append(_level(0, row=drawn.index("effect") + 1, width=1))
    label = {"text": "limit", "x": 1, "xanchor": "right", "y": limit, "yanchor": "bottom", "showarrow": False}
    figure = _figure(
        traces,
        [{"title": "update effect" if row == "effect" else row} for row in drawn],
        _HEIGHT_PX + _ROW_PX * (len(drawn) - 1),
        shapes=levels,
        annotations=[] if limit is None else [label | {"xref": "x domain", "yref": "y"}],
    )
    is_smoothed = any(len(run.history.get(keys["value"], ())) >= _FEWEST_TO_SMOOTH for run in runs)
    lines = "Thin: each training batch; thick: their running mean;" if is_smoothed else "Line: each training batch;"
    reading = f"{lines} points: held-out data with its 95 % interval."
    if len(weights) == 1 and not has_target:
        reading += f" Weight {weights.pop():g}."
    if "effect" in drawn:
        reading += (
            " Update effect: how much one update of all terms together changes this term on the same batch; below 0, "
            "the value falls."
        )
    return Chart(name, reading, figure)


def draw_shares(run: DrawnRun, names: Sequence[str]) -> Chart | None:
    """Stacked chart of each term's share of the gradient; None if no term has a share at any step.

    Args:
        names: terms in the order of `order_by_share`. The regularizers after the sixth are one band.
    """
    colors = term_colors(names)
    shares = {name: dict(run.history.get(f"term/{name}/grad_share", ())) for name in names}
    small = [name for name in names if name != BASE][len(PALETTE) :]
    bands = {name: points for name, points in shares.items() if points and name not in small}
    if small:
        steps = sorted({step for name in small for step in shares[name]})
        label = f"{len(small)} other terms"
        if steps:
            bands[label] = {step: sum(shares[name].get(step, 0.0) for name in small) for step in steps}
        colors[label] = _OTHERS
    if not bands:
        return None
    traces = [
        {
            "type": "scatter",
            "x": list(points),
            "y": list(points.values()),
            "name": name,
            "stackgroup": "share",
            "line": {"color": colors[name], "width": 1},
        }
        for name, points in bands.items()
    ]
    axis = {"title": "share of the gradient", "tickformat": ".0%", "range": [0, 1]}
    reading = (
        "Height of a band: the norm of the term's weighted gradient, divided by the sum of these norms over all terms."
    )
    return Chart("Share of the gradient", reading, _figure(traces, [axis], _HEIGHT_PX))


def draw_cosines(run: DrawnRun, names: Sequence[str]) -> Chart | None:
    """Line chart of the cosines of the pairs of gradients that conflict most; None if no pair has a cosine."""
    pairs = {
        f"{first}, {second}": points
        for index, first in enumerate(names)
        for second in names[index + 1 :]
        if (points := _cosine_points(run.history, first, second))
    }
    lowest = sorted(pairs, key=lambda pair: np.mean([cosine for _, cosine in pairs[pair]]))[: len(PALETTE)]
    if not lowest:
        return None
    colored = zip(lowest, PALETTE, strict=False)
    traces = [trace for pair, color in colored for trace in _line(pairs[pair], pair, color)]
    axis = {"title": "cosine", "range": [-1.05, 1.05]}
    figure = _figure(traces, [axis], _HEIGHT_PX, shapes=[_level(0, width=1)])
    reading = (
        "Below 0, two terms pull against each other; at 0, neither affects the other. The run warns of a conflict only "
        "if both terms have at least 5 % of the gradient."
    )
    if len(pairs) > len(lowest):
        reading += f" Shown are the {len(lowest)} of {len(pairs)} pairs with the lowest mean."
    return Chart("Cosines of the gradients", reading, figure)


def draw_conflicts(run: DrawnRun, names: Sequence[str]) -> Chart:
    """Heat map of the mean cosine of each pair of gradients."""
    cosines_KK = mean_cosines(run.history, names)
    trace = {
        "type": "heatmap",
        "z": cosines_KK,
        "text": [["" if np.isnan(cosine) else f"{cosine:+z.2f}" for cosine in row] for row in cosines_KK],
        "x": list(names),
        "y": list(names),
        "zmin": -1,
        "zmax": 1,
        "colorscale": _COSINE_COLORS,
        "texttemplate": "%{text}",
        "hoverongaps": False,
        "colorbar": {"title": {"text": "cosine"}},
    }
    height = max(_HEIGHT_PX, 120 + 30 * len(names))
    figure = _figure([trace], [{"title": "term", "autorange": "reversed"}], height, x_title="term")
    reading = (
        "Orange pairs pull against each other, blue ones in the same direction; a cell is empty if no step has a "
        "gradient of both terms."
    )
    is_wide = len(names) > _MAX_NARROW
    return Chart("Conflicts: mean cosine of the gradients", reading, figure, is_wide)


def mean_cosines(history: History, names: Sequence[str]) -> np.ndarray:
    """Mean cosine of each pair of terms over the steps at which both have a gradient, ``(K, K)``; NaN without any."""
    cosines_KK = np.full((len(names), len(names)), np.nan)
    np.fill_diagonal(cosines_KK, 1.0)
    for i, first in enumerate(names):
        for j, second in enumerate(names):
            points = _cosine_points(history, first, second)
            if i != j and points:
                cosines_KK[i, j] = np.mean([value for _, value in points])
    return cosines_KK


def smooth(values: Sequence[float]) -> tuple[int, list[float]]:
    """Return the width of a running mean and its values; the first values are means of fewer points.

    The width is a tenth of the number of points, but at least 2.

    >>> smooth([4.0, 2.0, 0.0])
    (2, [4.0, 3.0, 1.0])
    """
    width = max(2, len(values) // 10)
    return width, [float(np.mean(values[max(0, end - width) : end])) for end in range(1, len(values) + 1)]


def _cosine_points(history: History, first: str, second: str) -> Sequence[tuple[int, float]]:
    """Cosines of two terms at the steps at which both have a gradient; without one, the logged cosine is 0."""
    points = history.get(cosine_key(first, second)) or history.get(cosine_key(second, first)) or ()
    norms = [dict(history.get(f"term/{name}/grad_norm", ())) for name in (first, second)]
    return [(step, cosine) for step, cosine in points if all(norm.get(step) != 0 for norm in norms)]


def _run_colors(runs: Sequence[DrawnRun]) -> list[str]:
    return [PALETTE[index % len(PALETTE)] for index in range(len(runs))]


def _values(run: DrawnRun, train: str, held_out: str, color: str) -> list[dict[str, Any]]:
    """Raw and smoothed values of training batches, and held-out values."""
    label = f" {run.label}" if run.label else ""
    points = run.history.get(train, ()) if train else ()
    if len(points) < _FEWEST_TO_SMOOTH:
        traces = _line(points, f"training batch{label}", color)
    else:
        traces = _line(points, f"training batch{label}", color, width=1, opacity=0.55)
        width, means = smooth([value for _, value in points])
        smoothed = [(step, mean) for (step, _), mean in zip(points, means, strict=True)]
        traces += _line(smoothed, f"mean of {width} batches{label}", color, width=2.5)
    estimates = run.held_out(held_out) if held_out else {}
    if estimates:
        errors = [estimate.errors or (None, None) for estimate in estimates.values()]
        below, above = ([pair[side] for pair in errors] for side in (0, 1))
        trace: dict[str, Any] = {
            "type": "scatter",
            "x": list(estimates),
            "y": [estimate.value for estimate in estimates.values()],
            "name": f"held-out data{label}",
            "mode": "lines+markers",
            "line": {"color": color, "dash": "dot", "width": 1.5},
            "marker": {"size": 9, "symbol": "diamond"},
        }
        if any(estimate.has_interval for estimate in estimates.values()):
            bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
            trace["error_y"] = bars | {"thickness": 1.5, "width": 4}
        traces.append(trace)
    return traces


def _line(
    points: Sequence[tuple[int, float]],
    name: str,
    color: str,
    *,
    row: int = 1,
    width: float = 2,
    opacity: float = 1.0,
) -> list[dict[str, Any]]:
    """Line through points in a row of a chart; empty without points. The first row has the legend."""
    if not points:
        return []
    x, y = zip(*points, strict=True)
    return [
        {
            "type": "scatter",
            "x": x,
            "y": y,
            "name": name.strip(),
            "mode": "lines+markers" if len(points) < _FEWEST_TO_SMOOTH else "lines",
            "line": {"color": color, "width": width},
            "opacity": opacity,
            "marker": {"size": 5},
            "showlegend": row == 1,
            "xaxis": f"x{_axis(row)}",
            "yaxis": f"y{_axis(row)}",
        }
    ]


def _level(y: float, *, row: int = 1, **line: Any) -> dict[str, Any]:
    """Horizontal line across a row of a chart."""
    reference = {"xref": f"x{_axis(row)} domain", "yref": f"y{_axis(row)}"}
    return {"type": "line", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": {"color": NEUTRAL, **line}, **reference}


def _axis(row: int) -> str:
    """Number that Plotly appends to ``x`` and ``y`` to name the axes of a row: empty for row 1, ``2`` for row 2."""
    return "" if row == 1 else str(row)


def _figure(
    traces: Sequence[Mapping[str, Any]],
    y_axes: Sequence[Mapping[str, Any]],
    height: int,
    *,
    x_title: str = "step",
    **layout: Any,
) -> go.Figure:
    """Chart with one row per y axis, in the layout common to all charts.

    The first row is three times as high as each other row. The legend is above the plot, so that it never covers data.
    The top margin leaves room for it, because Plotly may draw a legend of several rows over the plot. The figure is
    validated as a whole, because each change of a figure takes Plotly milliseconds.
    """
    traces = [{**trace, "y": _rounded(trace["y"])} if trace["type"] == "scatter" else trace for trace in traces]
    num_entries = sum(trace.get("showlegend", True) for trace in traces)
    layout |= {
        "template": "none",
        "height": height,
        "margin": {"l": 60, "r": 16, "t": 12 + 20 * math.ceil(num_entries / 3), "b": 44},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yref": "container", "yanchor": "top"},
        "hovermode": "closest" if traces[0]["type"] == "heatmap" else "x unified",
        "font": {"size": 12},
    }
    num_rows = len(y_axes)
    unit = (1 - _ROW_GAP * (num_rows - 1)) / (num_rows + 2)
    top = 1.0
    for row, y_axis in enumerate(y_axes, start=1):
        bottom = top - unit * (3 if row == 1 else 1)
        x_axis = {"title": x_title} if row == num_rows else {"matches": f"x{_axis(num_rows)}", "showticklabels": False}
        shared = {"automargin": True, "zeroline": False}
        layout[f"xaxis{_axis(row)}"] = {"anchor": f"y{_axis(row)}", "showgrid": False, **shared, **x_axis}
        layout[f"yaxis{_axis(row)}"] = {
            "anchor": f"x{_axis(row)}",
            "domain": [max(bottom, 0.0), top],
            "exponentformat": "power",
            **shared,
            **y_axis,
            # With a standoff, the title keeps clear of wide tick labels.
            "title": {"text": y_axis["title"], "standoff": 8},
        }
        top = bottom - _ROW_GAP
    return go.Figure({"data": traces, "layout": layout})


def _rounded(values: Sequence[float]) -> list[float]:
    """Round values to nine digits: the axis of a constant with rounding errors would show all of its digits."""
    return [float(f"{value:.9g}") for value in values]
