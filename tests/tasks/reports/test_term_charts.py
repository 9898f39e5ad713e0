"""Charts of a run's terms agree with its metrics."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.reports.run_report import SENSITIVITY_COLUMNS, WINDOW, sensitivity_cells
from tasks.reports.term_charts import draw_conflicts, draw_contributions, draw_shares, draw_terms, mean_cosines

TERMS = ("base", "a", "b")
HISTORY = {
    "term/base/contribution": [(0, 2.0), (1, 1.0)],
    "term/a/contribution": [(0, -0.5), (1, 0.5)],
    "term/b/contribution": [(0, 3.0)],  # evaluated at every second step
    "term/a/cosine_to_base": [(0, -0.5), (1, -0.1)],
    "term/b/cosine_to_base": [(0, 0.25)],
    "cosine/a/b": [(0, 0.75)],
}


def test_contributions_are_stacked_and_negative_ones_stack_below_zero() -> None:
    (axes,) = draw_contributions(HISTORY, TERMS).axes
    tops = [surface.get_path().get_extents() for surface in axes.patches]  # one above zero and one below, per term
    assert max(top.y1 for top in tops) == 5.0
    assert min(top.y0 for top in tops) == -0.5
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(TERMS)


def test_held_out_values_have_bars_of_two_standard_errors() -> None:
    history = {
        "test/term/a/value": [(0, 4.0), (5, 2.0)],
        "test/term/a/stderr": [(0, 0.5), (5, 0.25)],
        "test/term/b/value": [(0, 1.0)],  # a single batch has no standard error
    }
    (panel,) = (axes for axes in draw_terms(history, TERMS).axes if "held-out" in axes.get_title())
    bars = {container.get_label(): container.lines[2][0].get_segments() for container in panel.containers}
    assert [bar.tolist() for bar in bars["a"]] == [[[0, 3.0], [0, 5.0]], [[5, 1.5], [5, 2.5]]]
    assert [bar.tolist() for bar in bars["b"]] == [[[0, 1.0], [0, 1.0]]]


def test_conflicts_are_means_over_the_steps_and_symmetric() -> None:
    expected = [[1.0, -0.3, 0.25], [-0.3, 1.0, 0.75], [0.25, 0.75, 1.0]]
    assert mean_cosines(HISTORY, TERMS).tolist() == pytest.approx(np.array(expected))
    (axes, _) = draw_conflicts(HISTORY, TERMS).axes
    assert [text.get_text() for text in axes.texts][:3] == ["+1.00", "-0.30", "+0.25"]


def test_terms_without_a_common_step_have_no_cosine() -> None:
    cosines_KK = mean_cosines({}, ("base", "a"))
    assert np.isnan(cosines_KK[0, 1])
    assert np.isnan(cosines_KK[1, 0])


@pytest.mark.parametrize("draw", [draw_terms, draw_contributions, draw_shares, draw_conflicts])
@pytest.mark.parametrize(("history", "terms"), [({}, ("base",)), (HISTORY, TERMS)])
def test_every_chart_renders_for_any_history(draw, history, terms, tmp_path) -> None:
    draw(history, terms).savefig(tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 0


def test_sensitivity_of_two_orthogonal_gradients() -> None:
    history = {
        "term/base/grad_norm_weighted": [(0, 3.0)],
        "term/a/grad_norm_weighted": [(0, 1.0)],
        "term/a/cosine_to_base": [(0, 0.0)],
        "term/monitor/grad_norm_weighted": [(0, 0.0)],
    }
    (row,) = sensitivity_cells(history, ("base", "a", "monitor"))
    assert len(row) == len(SENSITIVITY_COLUMNS)
    assert row == ("a", "25.0% (25.0% to 25.0%)", "14.3%", "40.0%", "76.9%", "+0.986", "+0.832", "+0.287", "x3")


def test_sensitivity_is_the_median_over_the_last_steps() -> None:
    """The last step alone has no gradient of the term, and the first is outside of the window."""
    norms = [9.0, *[1.0] * (WINDOW - 3), 3.0, 3.0, 0.0]
    history = {
        "term/base/grad_norm_weighted": [(step, 3.0) for step in range(len(norms))],
        "term/a/grad_norm_weighted": list(enumerate(norms)),
        "term/a/cosine_to_base": [(step, 0.0) for step in range(len(norms))],
    }
    (row,) = sensitivity_cells(history, ("base", "a"))
    assert row[:2] == ("a", "25.0% (0.0% to 50.0%)")
    assert row[-1] == "x3"
