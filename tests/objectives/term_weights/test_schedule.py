from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives.term_weights.schedule import Constant, Cosine, Linear, Warmup

WEIGHTS = st.floats(0, 1e6, allow_subnormal=False)


@given(WEIGHTS, WEIGHTS, st.integers(2, 1000))
@pytest.mark.parametrize("schedule", [Linear, Cosine])
def test_schedules_run_from_start_to_end_within_bounds(schedule, start, end, num_steps):
    ramp = schedule(start=start, end=end)
    weights = [ramp.weight_at(step, num_steps) for step in range(num_steps)]
    assert (weights[0], weights[-1]) == (start, end)
    slack = 1e-9 * max(start, end)
    assert min(start, end) - slack <= min(weights) <= max(weights) <= max(start, end) + slack


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Constant(value=0.5), [0.5, 0.5, 0.5, 0.5, 0.5]),
        (Linear(start=1, end=0), [1.0, 0.75, 0.5, 0.25, 0.0]),
        (Cosine(start=0, end=2), [0.0, 0.29289321881, 1.0, 1.70710678119, 2.0]),
        (Warmup(value=0.4, steps=2), [0.2, 0.4, 0.4, 0.4, 0.4]),
    ],
)
def test_values(schedule, expected):
    assert [schedule.weight_at(step, num_steps=5) for step in range(5)] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", [Linear(start=1, end=3), Cosine(start=1, end=3)])
def test_a_single_step_has_the_start_and_extra_steps_keep_the_end(schedule):
    assert schedule.weight_at(0, num_steps=1) == 1
    assert schedule.weight_at(9, num_steps=5) == 3
