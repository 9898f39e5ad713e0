"""Decision to promote a checkpoint with a confidence."""

from __future__ import annotations

import pytest

from flows.runs.promotion import Measurement, find_rejection
from tasks.training.held_out import BatchValues


def measurement(right: int, problems: str = "a", num: int = 8) -> Measurement:
    return Measurement(right / num, BatchValues([1.0] * right + [0.0] * (num - right), [1] * num, problems))


@pytest.mark.parametrize(
    ("condition", "checkpoint", "baseline", "rejection"),
    [
        ("test/m > baseline", measurement(5), measurement(0), ""),
        ("test/m < baseline", measurement(0), measurement(5), ""),
        ("test/m > baseline", measurement(0), measurement(5), "test/m is 0, but promote_if requires > 0.625"),
        ("test/m > baseline", measurement(4), measurement(0), "by 0.5 on 8 problems, which happens by chance"),
        ("test/m > baseline", measurement(5, "b"), measurement(0), "were measured on different problems"),
        ("test/m > baseline", Measurement(0.5, None), measurement(0), "test/m was not measured by problem"),
        ("test/m > baseline", Measurement(None, None), measurement(0), "the metric was not measured"),
        (None, measurement(0), measurement(5), ""),
    ],
)
def test_rejection(condition: str | None, checkpoint: Measurement, baseline: Measurement, rejection: str) -> None:
    """Of 8 problems, 5 better answers are significant at 5 % (1 / 32), and 4 are not (1 / 16)."""
    reason = find_rejection(condition, 0.95, checkpoint, baseline)
    assert rejection in reason
    assert bool(reason) == bool(rejection)
