"""The drawings of a run's terms say what its metrics say."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.report import SENSITIVITY_COLUMNS, sensitivity_cells
from tasks.term_charts import draw_conflicts, draw_contributions, draw_shares, draw_terms, mean_cosines

TERMS = ("base", "a", "b")
HISTORY = {
    "term/base/contribution": [(0, 2.0), (1, 1.0)],
    "term/a/contribution": [(0, -0.5), (1, 0.5)],
    "term/b/contribution": [(0, 3.0)],  # evaluated at every second step
    "term/a/cosine_to_base": [(0, -0.5), (1, -0.1)],
    "term/b/cosine_to_base": [(0, 0.25)],
    "cosine/a/b": [(0, 0.75)],
}


def test_contributions_are_stacked_and_negative_ones_hang_below() -> None:
    (axes,) = draw_contributions(HISTORY, TERMS).axes
    tops = [surface.get_path().get_extents() for surface in axes.patches]  # one above zero and one below, per term
    assert max(top.y1 for top in tops) == 5.0
    assert min(top.y0 for top in tops) == -0.5
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(TERMS)


def test_conflicts_are_means_over_the_steps_and_symmetric() -> None:
    expected = [[1.0, -0.3, 0.25], [-0.3, 1.0, 0.75], [0.25, 0.75, 1.0]]
    assert mean_cosines(HISTORY, TERMS).tolist() == pytest.approx(np.array(expected))
    (axes, _) = draw_conflicts(HISTORY, TERMS).axes
    assert [text.get_text() for text in axes.texts][:3] == ["+1.00", "-0.30", "+0.25"]


def test_terms_that_never_met_have_no_cosine() -> None:
    found = mean_cosines({}, ("base", "a"))
    assert np.isnan(found[0, 1])
    assert np.isnan(found[1, 0])


@pytest.mark.parametrize("draw", [draw_terms, draw_contributions, draw_shares, draw_conflicts])
@pytest.mark.parametrize(("history", "terms"), [({}, ("base",)), (HISTORY, TERMS)])
def test_every_drawing_can_be_drawn_of_any_history(draw, history, terms, tmp_path) -> None:
    draw(history, terms).savefig(tmp_path / "drawing.png")
    assert (tmp_path / "drawing.png").stat().st_size > 0


def test_sensitivity_of_two_gradients_at_right_angles() -> None:
    metrics = {
        "term/base/grad_norm_weighted": 3.0,
        "term/a/grad_norm_weighted": 1.0,
        "term/a/cosine_to_base": 0.0,
        "term/monitor/grad_norm_weighted": 0.0,
    }
    (row,) = sensitivity_cells(metrics, ("base", "a", "monitor"))
    assert len(row) == len(SENSITIVITY_COLUMNS)
    assert row == ("a", "25.0%", "14.3%", "40.0%", "76.9%", "+0.986", "+0.832", "+0.287", "x3")
