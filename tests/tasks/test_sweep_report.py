"""The figures of a sweep's report, held to what was put into them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from tasks.page import drawn
from tasks.sweep_charts import draw_effects, draw_maps, draw_parallel, draw_pareto, pareto_front
from tasks.sweep_effects import TENFOLD, TRAINED, effects, fit, shown_metrics
from tasks.sweep_table import PointRow, columns_of, interval, point_rows, row_cells
from tasks.trials import Point, Status, Trial, Trials

SUBSETS: dict[int, Mapping[str, float]] = {
    1: {"a": 0, "b": 0},
    2: {"a": 2, "b": 0},
    3: {"a": 0, "b": 5},
    4: {"a": 2, "b": 5},
}


def rows_of(metrics: Mapping[tuple[int, int], Mapping[str, float]], **values: object) -> list[PointRow]:
    """Points with these metrics by point and seed; `values` names a dimension and gives its value by point."""
    numbers = sorted({point for point, _ in metrics})
    points = tuple(Point(n, {name: by[n] for name, by in values.items()}) for n in numbers)  # type: ignore[index]
    ended = {key: Trial(*key, "x", "completed", value=each["loss"], metrics=each) for key, each in metrics.items()}
    return point_rows(Trials(points, ended), sorted({seed for _, seed in metrics}), "loss", "min")


def test_effects_are_the_ones_that_made_the_metrics() -> None:
    """loss = 3 - 0.5 a + 0.2 b + 0.1 seed, without noise: the fit finds it, and is sure of it."""
    metrics = {
        (point, seed): {"loss": 3 - 0.5 * (on["a"] > 0) + 0.2 * (on["b"] > 0) + 0.1 * seed}
        for point, on in SUBSETS.items()
        for seed in (0, 1, 2)
    }
    found = effects(rows_of(metrics), SUBSETS, ["loss"])
    assert [(each.regularizer, each.of) for each in found] == [("a", TRAINED), ("b", TRAINED)]
    assert [each.estimate for each in found] == pytest.approx([-0.5, 0.2])
    assert [each.half_width for each in found] == pytest.approx([0.0, 0.0], abs=1e-9)


def test_the_interval_of_an_effect_holds_it_as_often_as_it_says() -> None:
    random, held = np.random.default_rng(0), 0
    for _ in range(300):
        metrics = {
            (point, seed): {"loss": 1.0 - 0.5 * (on["a"] > 0) + random.normal(0, 0.3)}
            for point, on in SUBSETS.items()
            for seed in range(3)
        }
        effect = effects(rows_of(metrics), SUBSETS, ["loss"])[0]
        held += abs(effect.estimate + 0.5) <= effect.half_width
    assert 0.91 < held / 300 < 0.98


def test_ten_times_the_weight_is_apart_from_being_trained_at_all() -> None:
    strengths = {1: {"a": 0.0}, 2: {"a": 0.1}, 3: {"a": 1.0}, 4: {"a": 10.0}}
    metrics = {(n, 0): {"loss": 2.0 if not s["a"] else 1.0 - 0.25 * math.log10(s["a"])} for n, s in strengths.items()}
    found = {each.of: each for each in effects(rows_of(metrics), strengths, ["loss"])}
    assert found[TRAINED].estimate == pytest.approx(-1.0)
    assert found[TENFOLD].estimate == pytest.approx(-0.25)


def test_another_dimension_is_not_taken_for_an_effect() -> None:
    """The rate is worth 1 per factor of ten, and goes with the regularizer more often than not."""
    rates = {1: 1e-3, 2: 1e-2, 3: 1e-1, 4: 1e-2}
    on = {n: {"a": float(n in (2, 3))} for n in rates}
    metrics = {(n, 0): {"loss": math.log10(rate) + 0.5 * on[n]["a"]} for n, rate in rates.items()}
    (found,) = effects(rows_of(metrics, rate=rates), on, ["loss"])
    assert found.estimate == pytest.approx(0.5)


def test_what_cannot_be_told_apart_is_not_made_up() -> None:
    together = {1: {"a": 0.0, "b": 0.0}, 2: {"a": 1.0, "b": 1.0}}
    found = effects(rows_of({(1, 0): {"loss": 1.0}, (2, 0): {"loss": 2.0}}), together, ["loss"])
    assert all(math.isnan(each.estimate) for each in found)
    estimates, widths = fit(np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([1.0, 3.0]))
    assert estimates == pytest.approx([1.0, 2.0])
    assert np.isnan(widths).all()  # as many unknowns as trials


def test_the_table_has_the_best_first_with_mean_and_interval() -> None:
    rows = rows_of(
        {(1, 0): {"loss": 2.0}, (1, 1): {"loss": 4.0}, (2, 0): {"loss": 1.0}, (2, 1): {"loss": 2.0}},
        rate={1: 0.1, 2: 0.2},
    )
    assert [row.point.number for row in rows] == [2, 1]
    assert columns_of(rows, "loss")[:4] == ("point", "rate", "loss", "95 % interval")
    assert row_cells(rows[0], rows)[:5] == ("2", "0.2", "1.5000", "± 6.3531", "2 completed")
    assert interval([1.0]) is None


def test_a_point_that_lacks_a_seed_is_never_the_best() -> None:
    def trial(point: int, seed: int, status: Status, value: float | None) -> Trial:
        return Trial(point, seed, "x", status, value=value)

    ended = {
        (1, 0): trial(1, 0, "completed", 0.1),
        (1, 1): trial(1, 1, "failed", None),
        (2, 0): trial(2, 0, "completed", 5.0),
        (2, 1): trial(2, 1, "completed", 6.0),
        (3, 0): trial(3, 0, "pruned", 0.0),
        (3, 1): trial(3, 1, "failed", None),
    }
    rows = point_rows(Trials(tuple(Point(n, {}) for n in (1, 2, 3)), ended), (0, 1), "loss", "min")
    assert [(row.point.number, row.is_complete) for row in rows] == [(2, True), (1, False), (3, False)]
    assert rows[2].mean is None  # what a trial had when it was pruned is not what it came to


def test_a_pareto_front_is_what_no_other_point_is_below() -> None:
    random = np.random.default_rng(1)
    points = [(float(x), float(y)) for x, y in random.integers(0, 6, (40, 2))]
    for (a, b), is_best in zip(points, pareto_front(points), strict=True):
        assert is_best == (not any((x <= a and y < b) or (x < a and y <= b) for x, y in points))


def test_every_drawing_is_drawn_from_numbers_words_and_what_is_missing() -> None:
    metrics = {
        (n, 0): {"loss": 1.0 / n, "loss/base": float(n), "term/a/value": 1.0 / n, "term/b/value": 2.0}
        for n in range(1, 10)
    }
    rates = {n: 10.0**-n for n in range(1, 10)}
    words = {n: ("all", "without a")[n % 2] for n in range(1, 10)}
    rows = rows_of(metrics, rate=rates, ablation=words)
    rows[3] = PointRow(Point(99, {"rate": 0.5}), rows[3].trials, rows[3].completed, True, 0.7, None)
    strengths = {row.point.number: {"a": float(row.point.number % 2), "b": 1.0} for row in rows}
    shown = shown_metrics(rows, "loss", ["a", "b", "c"])
    assert shown == ["loss", "loss/base", "term/a/value", "term/b/value"]
    found = effects(rows, strengths, shown)
    for figure in (
        draw_effects(found, {"loss": 0.3, "loss/base": 2.6, "term/a/value": 0.3, "term/b/value": 0.0}),
        draw_pareto(rows, "loss/base", ["a", "b"]),
        draw_maps(rows, "loss"),
        draw_parallel(rows, "loss", "max"),
    ):
        assert drawn(figure, "png").startswith(b"\x89PNG")
