"""Standard error of graded answers."""

from __future__ import annotations

import pytest
from scipy import stats

from tasks.evaluation.grading_metrics import Graded, summarize

RIGHT, WRONG = Graded(True, False), Graded(False, False)


def test_the_standard_error_is_over_problems() -> None:
    """The answers to one problem are no independent observations, so a single problem has no standard error."""
    graded_PG = [[RIGHT, WRONG], [WRONG, WRONG], [RIGHT, RIGHT]]
    assert summarize("m", graded_PG, [])["test/m_stderr"] == pytest.approx(stats.sem([0.5, 0.0, 1.0]))
    alone = summarize("m", graded_PG[:1], [])
    assert alone["test/m"] == 0.5
    assert "test/m_stderr" not in alone
