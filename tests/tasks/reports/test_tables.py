"""Figures and intervals in the tables of a run."""

from __future__ import annotations

import pytest

from tasks.common.proportions import Interval
from tasks.reports.tables import Estimate, HeldOutRow, TermRow, describe_intervals, format_row


def row(after: Estimate, change: Estimate) -> HeldOutRow:
    return HeldOutRow("metric", 0, 4, after, after, change)


@pytest.mark.parametrize(
    ("rows", "expected", "unexpected"),
    [
        ([row(Estimate(1.0), Estimate(0.5))], [], ["95 %", "no interval"]),
        ([row(Estimate(1.0, 0.2), Estimate(0.5, 0.1))], ["±: 95 %"], ["brackets", "no interval"]),
        ([row(Estimate(1.0), Estimate(0.5, 0.1))], ["±: 95 %", "no interval"], ["brackets"]),
        ([row(Estimate(0.5, bounds=Interval(0.2, 0.8)), Estimate(0.5))], ["brackets"], ["±", "no interval"]),
    ],
    ids=["none", "all", "change", "share"],
)
def test_only_intervals_of_the_table_are_explained(
    rows: list[HeldOutRow], expected: list[str], unexpected: list[str]
) -> None:
    text = describe_intervals(rows)
    assert all(words in text for words in expected)
    assert not any(words in text for words in unexpected)


def test_rounding_errors_are_no_change() -> None:
    """Margins of equal policies are sums of float32 logprobs, whose rounding errors are no results."""
    same = row(Estimate(2.384e-08), Estimate(-1.2e-08))
    assert same.describe_change() == "metric did not measurably change on held-out data: ≈0."
    assert format_row(TermRow("a", -3e-9, 0.5, 1e-12, 0.0, 0.0))[1:4] == ("≈0", "0.5", "≈0")


@pytest.mark.parametrize(
    ("value", "half_width", "text"),
    [
        (1.5481, 0.1134, "1.55 ± 0.11"),
        (-0.16237, 0.0084, "-0.1624 ± 0.0084"),
        (812.4, 35.2, "812 ± 35"),
        (1e6, 2.5e4, "1000000 ± 25000"),
        (-0.001, 0.5, "0.00 ± 0.50"),
        (0.5, 3e-9, "0.5 ± ≈0"),
    ],
)
def test_a_value_has_the_digits_of_its_interval(value: float, half_width: float, text: str) -> None:
    assert str(Estimate(value, half_width)) == text
