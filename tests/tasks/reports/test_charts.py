"""Interactive charts agree with the metrics of a run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from tasks.reports.charts import (
    NEUTRAL,
    PALETTE,
    Chart,
    DrawnRun,
    draw_conflicts,
    draw_cosines,
    draw_metric,
    draw_shares,
    draw_term,
    mean_cosines,
    order_by_share,
    smooth,
    term_colors,
)
from tasks.reports.tables import cosine_key
from tasks.training.held_out import BatchValues

TERMS = ("base", "a", "b")
HISTORY = {
    "term/base/grad_share": [(0, 0.5), (1, 0.75)],
    "term/a/grad_share": [(0, 0.5), (1, 0.25)],
    "term/a/cosine_to_base": [(0, -0.5), (1, -0.1)],
    "term/b/cosine_to_base": [(0, 0.25)],
    "cosine/a/b": [(0, 0.75)],
}


def trace(chart: Chart | None, name: str):
    assert chart
    (found,) = (trace for trace in chart.figure.data if trace.name == name)
    return found


def test_shares_are_stacked_in_the_colors_of_the_terms() -> None:
    chart = draw_shares(DrawnRun(HISTORY), TERMS)
    assert chart
    assert {line.name: (list(line.y), line.stackgroup, line.line.color) for line in chart.figure.data} == {
        "base": ([0.5, 0.75], "share", NEUTRAL),
        "a": ([0.5, 0.25], "share", PALETTE[0]),
    }


def test_held_out_values_have_the_interval_of_a_t_test() -> None:
    values = [0.1, 0.3, 0.25, 0.4]
    history = {"test/term/a/value": [(0, 0.2625), (5, 2.0)]}
    run = DrawnRun(history, {0: {"a": BatchValues(values, [4] * 4)}})
    points = trace(draw_term([run], "a"), "held-out data")
    interval = ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert points.error_y.array[0] == pytest.approx((interval.high - interval.low) / 2)
    assert points.error_y.array[1] is None  # its batches are not stored
    assert list(points.y) == pytest.approx([0.2625, 2.0])


def test_a_long_curve_is_drawn_raw_and_smoothed() -> None:
    values = [float(number) for number in np.random.default_rng(0).normal(size=40)]
    chart = draw_metric([DrawnRun({"x": list(enumerate(values))})], "X", "nats", "", train="x")
    assert list(trace(chart, "training batch").y) == pytest.approx(values, rel=1e-8)
    means = [np.mean(values[max(0, step - 3) : step + 1]) for step in range(40)]
    assert list(trace(chart, "mean of 4 batches").y) == pytest.approx(means)
    assert smooth([1.0]) == (2, [1.0])


def test_a_term_shows_its_multiplier_and_limit_or_its_weight() -> None:
    history = {f"term/a/{field}": [(0, 1.0), (1, 2.0)] for field in ("value", "weight", "effect")}
    plain = draw_term([DrawnRun(history)], "a")
    assert plain
    assert [axis.title.text for axis in plain.figure.select_yaxes()] == ["value", "weight", "update effect"]
    held = draw_term([DrawnRun(history | {"term/a/multiplier": [(0, 0.0)]})], "a", limit=0.25)
    assert held
    assert [axis.title.text for axis in held.figure.select_yaxes()] == ["value", "multiplier", "update effect"]
    both = draw_term([DrawnRun(history), DrawnRun(history | {"term/a/multiplier": [(0, 0.0)]})], "a")
    assert both
    assert [axis.title.text for axis in both.figure.select_yaxes()][1:3] == ["weight", "multiplier"]
    assert 0.25 in [shape.y0 for shape in held.figure.layout.shapes]
    assert "term/a/value" in history
    assert draw_term([DrawnRun({})], "a") is None


def test_a_constant_weight_is_a_sentence_and_no_chart() -> None:
    history = {"term/a/value": [(0, 1.0), (1, 2.0)], "term/a/weight": [(0, 0.5), (1, 0.5)]}
    chart = draw_term([DrawnRun(history)], "a")
    assert chart is not None
    assert [axis.title.text for axis in chart.figure.select_yaxes()] == ["value"]
    assert "Weight 0.5." in chart.reading
    other = {"term/a/value": [(0, 1.0)], "term/a/weight": [(0, 2.0)]}
    compared = draw_term([DrawnRun(history, label="x"), DrawnRun(other, label="y")], "a")
    assert compared is not None
    assert [axis.title.text for axis in compared.figure.select_yaxes()] == ["value", "weight"]


def test_small_terms_share_one_band_and_few_pairs_are_drawn() -> None:
    names = ["base", *(f"t{number}" for number in range(12))]
    shares = {"base": 0.34} | {f"t{number}": 0.01 * number for number in range(12)}
    history = {f"term/{name}/grad_share": [(0, share), (1, share)] for name, share in shares.items()}
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            history[cosine_key(first, second)] = [(0, -0.9 if (first, second) == ("t3", "t7") else 0.1)]
    run = DrawnRun(history)
    ordered = order_by_share(run, names)
    assert ordered[:3] == ["base", "t11", "t10"]
    bands = draw_shares(run, ordered)
    assert bands is not None
    heights = {trace.name: trace.y[0] for trace in bands.figure.data}
    assert list(heights) == ["base", *(f"t{number}" for number in range(11, 5, -1)), "6 other terms"]
    assert heights["6 other terms"] == pytest.approx(0.15)
    assert sum(heights.values()) == pytest.approx(1.0)
    assert len({trace.line.color for trace in bands.figure.data}) == 8
    cosines = draw_cosines(run, ordered)
    assert cosines is not None
    assert len(cosines.figure.data) == 6
    assert cosines.figure.data[0].y == (-0.9,)
    assert "Shown are the 6 of 78 pairs with the lowest mean." in cosines.reading
    assert draw_conflicts(run, ordered).is_wide


def test_two_runs_have_different_colors_and_names() -> None:
    runs = [DrawnRun({"x": [(0, 1.0)]}, label="first"), DrawnRun({"x": [(0, 2.0)]}, label="second")]
    chart = draw_metric(runs, "X", "nats", "", train="x")
    assert trace(chart, "training batch first").line.color == PALETTE[0]
    assert trace(chart, "training batch second").line.color == PALETTE[1]


def test_conflicts_are_means_over_the_steps_and_symmetric() -> None:
    expected = [[1.0, -0.3, 0.25], [-0.3, 1.0, 0.75], [0.25, 0.75, 1.0]]
    assert mean_cosines(HISTORY, TERMS).tolist() == pytest.approx(np.array(expected))
    assert np.asarray(draw_conflicts(DrawnRun(HISTORY), TERMS).figure.data[0].z).tolist() == pytest.approx(
        np.array(expected)
    )


def test_conflicts_leave_out_steps_at_which_a_term_has_no_gradient() -> None:
    """The cosine of a zero gradient is logged as 0."""
    history = {
        "term/a/cosine_to_base": [(0, 0.0), (1, 0.0), (2, -0.8)],
        "term/a/grad_norm": [(0, 0.0), (1, 0.0), (2, 0.5)],
        "term/base/grad_norm": [(0, 1.0), (1, 1.0), (2, 1.0)],
    }
    assert mean_cosines(history, ("base", "a"))[0, 1] == -0.8
    assert list(trace(draw_cosines(DrawnRun(history), ("base", "a")), "base, a").x) == [2]


def test_conflicts_have_no_negative_zero() -> None:
    history = {"term/a/cosine_to_base": [(0, -0.001)], "term/a/weight": [(0, 1.0)], "term/base/weight": [(0, 1.0)]}
    text = draw_conflicts(DrawnRun(history), ["base", "a", "b"]).figure.data[0].text
    assert np.asarray(text).tolist() == [["+1.00", "+0.00", ""], ["+0.00", "+1.00", ""], ["", "", "+1.00"]]


def test_every_pair_has_a_cosine_over_the_steps() -> None:
    chart = draw_cosines(DrawnRun(HISTORY), TERMS)
    assert list(trace(chart, "base, a").y) == [-0.5, -0.1]
    assert list(trace(chart, "a, b").y) == [0.75]


def test_terms_without_a_common_step_have_no_cosine() -> None:
    cosines_KK = mean_cosines({}, ("base", "a"))
    assert np.isnan(cosines_KK[0, 1])
    assert np.isnan(cosines_KK[1, 0])


def test_a_chart_of_no_data_is_none() -> None:
    empty = DrawnRun({})
    assert draw_metric([empty], "X", "nats", "", train="x", held_out="test/x") is None
    assert draw_shares(empty, TERMS) is None
    assert draw_cosines(empty, TERMS) is None


def luminance(color: str) -> float:
    """Relative luminance of a color by WCAG 2."""
    channels = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colors_are_visible_on_light_and_dark_pages() -> None:
    assert len(set(term_colors([f"term-{number}" for number in range(6)]).values())) == 7
    for color in (*PALETTE, NEUTRAL):
        light, dark = (1.05) / (luminance(color) + 0.05), (luminance(color) + 0.05) / (luminance("#0f1318") + 0.05)
        assert min(light, dark) > 2, color
        assert math.isfinite(light)
