"""Numbers and charts of a sweep's report."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import numpy as np
import pytest

from tasks.reports.html import render_figure
from tasks.sweeps.charts import draw_effects, draw_maps, draw_parallel, draw_pareto, pareto_front
from tasks.sweeps.effects import TENFOLD, TRAINED, estimate_effects, fit_least_squares, reported_metrics
from tasks.sweeps.store import Point, Status, Trial, Trials
from tasks.sweeps.table import PointRow, interval, point_rows, row_cells, table_columns

SUBSETS: dict[int, Mapping[str, float]] = {
    1: {"a": 0, "b": 0},
    2: {"a": 2, "b": 0},
    3: {"a": 0, "b": 5},
    4: {"a": 2, "b": 5},
}


def rows_of(metrics: Mapping[tuple[int, int], Mapping[str, float]], **values: object) -> list[PointRow]:
    """Rows with the given metrics by point and seed; `values` maps each dimension to its values by point."""
    numbers = sorted({point for point, _ in metrics})
    points = tuple(Point(n, {name: by[n] for name, by in values.items()}) for n in numbers)  # type: ignore[index]
    finished = {
        key: Trial(*key, "x", "completed", value=logged["loss"], metrics=logged) for key, logged in metrics.items()
    }
    return point_rows(Trials(points, finished), sorted({seed for _, seed in metrics}), "loss", "min")


def test_noiseless_effects_are_recovered_exactly() -> None:
    """loss = 3 - 0.5 a + 0.2 b + 0.1 seed."""
    metrics = {
        (point, seed): {"loss": 3 - 0.5 * (on["a"] > 0) + 0.2 * (on["b"] > 0) + 0.1 * seed}
        for point, on in SUBSETS.items()
        for seed in (0, 1, 2)
    }
    effects = estimate_effects(rows_of(metrics), SUBSETS, ["loss"])
    assert [(effect.regularizer, effect.change) for effect in effects] == [("a", TRAINED), ("b", TRAINED)]
    assert [effect.estimate for effect in effects] == pytest.approx([-0.5, 0.2])
    assert [effect.half_width for effect in effects] == pytest.approx([0.0, 0.0], abs=1e-9)


def test_interval_of_an_effect_has_95_percent_coverage() -> None:
    random, num_covered = np.random.default_rng(0), 0
    for _ in range(300):
        metrics = {
            (point, seed): {"loss": 1.0 - 0.5 * (on["a"] > 0) + random.normal(0, 0.3)}
            for point, on in SUBSETS.items()
            for seed in range(3)
        }
        effect = estimate_effects(rows_of(metrics), SUBSETS, ["loss"])[0]
        num_covered += abs(effect.estimate + 0.5) <= effect.half_width
    assert 0.91 < num_covered / 300 < 0.98


def test_effect_of_a_tenfold_weight_is_separate_from_the_effect_of_training() -> None:
    strengths = {1: {"a": 0.0}, 2: {"a": 0.1}, 3: {"a": 1.0}, 4: {"a": 10.0}}
    metrics = {(n, 0): {"loss": 2.0 if not s["a"] else 1.0 - 0.25 * math.log10(s["a"])} for n, s in strengths.items()}
    effects = {effect.change: effect for effect in estimate_effects(rows_of(metrics), strengths, ["loss"])}
    assert effects[TRAINED].estimate == pytest.approx(-1.0)
    assert effects[TENFOLD].estimate == pytest.approx(-0.25)


def test_correlated_dimension_is_not_counted_as_an_effect() -> None:
    """The rate adds 1 per factor of ten and correlates with the regularizer."""
    rates = {1: 1e-3, 2: 1e-2, 3: 1e-1, 4: 1e-2}
    on = {n: {"a": float(n in (2, 3))} for n in rates}
    metrics = {(n, 0): {"loss": math.log10(rate) + 0.5 * on[n]["a"]} for n, rate in rates.items()}
    (effect,) = estimate_effects(rows_of(metrics, rate=rates), on, ["loss"])
    assert effect.estimate == pytest.approx(0.5)


@pytest.mark.parametrize(
    "dimension",
    [
        "objective.regularizers.a.weight",
        "objective.regularizers.a.weight.end",
        "policy.training.objective.regularizers.a.weight",
    ],
)
def test_a_weight_is_no_dimension_next_to_its_effect(dimension: str) -> None:
    weights = {1: 0.1, 2: 1.0, 3: 10.0}
    metrics = {(n, seed): {"loss": 0.5 * math.log10(weight)} for n, weight in weights.items() for seed in (0, 1)}
    rows = rows_of(metrics, **{dimension: weights})
    (effect,) = estimate_effects(rows, {n: {"a": weight} for n, weight in weights.items()}, ["loss"])
    assert (effect.change, effect.estimate) == (TENFOLD, pytest.approx(0.5))


def test_a_parameter_of_an_ablated_regularizer_leaves_its_effect_determined() -> None:
    """Trials without the regularizer have no value of its parameter."""
    limits: dict[int, float | None] = {1: None, 2: 1.0, 3: 2.0}
    loss = {1: 1.0, 2: 0.8, 3: 0.7}
    rows = rows_of({(n, 0): {"loss": value} for n, value in loss.items()}, limit=limits)
    (effect,) = estimate_effects(rows, {n: {"a": float(n > 1)} for n in loss}, ["loss"])
    assert effect.estimate == pytest.approx(-0.25)  # at the mean limit


def test_confounded_effects_are_nan() -> None:
    together = {1: {"a": 0.0, "b": 0.0}, 2: {"a": 1.0, "b": 1.0}}
    effects = estimate_effects(rows_of({(1, 0): {"loss": 1.0}, (2, 0): {"loss": 2.0}}), together, ["loss"])
    assert all(math.isnan(effect.estimate) for effect in effects)
    estimates, widths = fit_least_squares(np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([1.0, 3.0]))
    assert estimates == pytest.approx([1.0, 2.0])
    assert np.isnan(widths).all()  # as many unknowns as trials


def test_table_has_the_best_point_first_with_mean_and_interval() -> None:
    rows = rows_of(
        {(1, 0): {"loss": 2.0}, (1, 1): {"loss": 4.0}, (2, 0): {"loss": 1.0}, (2, 1): {"loss": 2.0}},
        rate={1: 0.1, 2: 0.2},
    )
    assert [row.point.number for row in rows] == [2, 1]
    assert table_columns(rows, "loss")[:4] == ("point", "rate", "loss", "95 % interval")
    assert row_cells(rows[0], rows)[:5] == ("2", "0.2", "1.5000", "± 6.3531", "2 completed")
    assert interval([1.0]) is None


@pytest.mark.parametrize("odd", [math.nan, math.inf, sys.float_info.max])
def test_a_metric_without_a_value_leaves_its_trial_out(odd: float) -> None:
    """An evaluator may return NaN in one trial; MLflow stores infinity as the largest number."""
    metrics = {
        (point, seed): {"loss": 1.0 + seed, "test/odd": 3.0 - 0.5 * (on["a"] > 0) + 0.2 * (on["b"] > 0)}
        for point, on in SUBSETS.items()
        for seed in (0, 1)
    }
    metrics[1, 0]["test/odd"] = odd
    rows = rows_of(metrics)
    effects = estimate_effects(rows, SUBSETS, ["test/odd"])
    assert [effect.estimate for effect in effects] == pytest.approx([-0.5, 0.2])
    assert next(row for row in rows if row.point.number == 1).mean_of("test/odd") == 3.0


def test_charts_of_values_with_dollar_signs() -> None:
    prompts = {1: "$a$_$", 2: "$5 or $6"}
    rows = rows_of({(1, 0): {"loss": 1.0}, (2, 0): {"loss": 2.0}}, prompt=prompts, rate={1: 0.1, 2: 0.2})
    for figure in (draw_maps(rows, "loss"), draw_parallel(rows, "loss", "min")):
        assert render_figure(figure, "png").startswith(b"\x89PNG")


def test_seeds_that_the_sweep_no_longer_has_do_not_count() -> None:
    finished = {(1, seed): Trial(1, seed, "x", "completed", value=float(seed)) for seed in (1, 2, 30)}
    (row,) = point_rows(Trials((Point(1, {}),), finished), (1, 2), "loss", "min")
    assert (row.mean, len(row.trials)) == (1.5, 2)


def test_point_that_lacks_a_seed_is_never_the_best() -> None:
    def trial(point: int, seed: int, status: Status, value: float | None) -> Trial:
        return Trial(point, seed, "x", status, value=value)

    finished = {
        (1, 0): trial(1, 0, "completed", 0.1),
        (1, 1): trial(1, 1, "failed", None),
        (2, 0): trial(2, 0, "completed", 5.0),
        (2, 1): trial(2, 1, "completed", 6.0),
        (3, 0): trial(3, 0, "pruned", 0.0),
        (3, 1): trial(3, 1, "failed", None),
    }
    rows = point_rows(Trials(tuple(Point(n, {}) for n in (1, 2, 3)), finished), (0, 1), "loss", "min")
    assert [(row.point.number, row.is_complete) for row in rows] == [(2, True), (1, False), (3, False)]
    assert rows[2].mean is None  # the value of a pruned trial does not count


def test_pareto_front_has_the_points_that_no_other_point_dominates() -> None:
    random = np.random.default_rng(1)
    points = [(float(x), float(y)) for x, y in random.integers(0, 6, (40, 2))]
    for (a, b), is_best in zip(points, pareto_front(points), strict=True):
        assert is_best == (not any((x <= a and y < b) or (x < a and y <= b) for x, y in points))


def test_every_chart_renders_numbers_words_and_missing_values() -> None:
    metrics = {
        (n, 0): {"loss": 1.0 / n, "loss/base": float(n), "term/a/value": 1.0 / n, "term/b/value": 2.0}
        for n in range(1, 10)
    }
    rates = {n: 10.0**-n for n in range(1, 10)}
    words = {n: ("all", "without a")[n % 2] for n in range(1, 10)}
    rows = rows_of(metrics, rate=rates, ablation=words)
    rows[3] = PointRow(Point(99, {"rate": 0.5}), rows[3].trials, rows[3].completed, True, 0.7, None)
    strengths = {row.point.number: {"a": float(row.point.number % 2), "b": 1.0} for row in rows}
    reported = reported_metrics(rows, "loss", ["a", "b", "c"])
    assert reported == ["loss", "loss/base", "term/a/value", "term/b/value"]
    effects = estimate_effects(rows, strengths, reported)
    for figure in (
        draw_effects(effects, {"loss": 0.3, "loss/base": 2.6, "term/a/value": 0.3, "term/b/value": 0.0}),
        draw_pareto(rows, "loss/base", ["a", "b"]),
        draw_maps(rows, "loss"),
        draw_parallel(rows, "loss", "max"),
    ):
        assert render_figure(figure, "png").startswith(b"\x89PNG")
