"""Samples of `make chaos`: one run with two faults, and one with a fault of each sort in the slow suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.judge import judge, run_reference
from chaos.schedule import LEASE_S, NUM_STEPS, Fault, Schedule, draw_schedule
from chaos.servers import processes_of, running_testbed

pytestmark = pytest.mark.process

DROP = Fault(updates=5, after_s=0.2, target="engine", action="drop response", skip=1, seconds=0.0)
KILL_ENGINE = Fault(updates=9, after_s=0.1, target="engine", action="kill", skip=0, seconds=0.5)
REPLACE = Fault(updates=12, after_s=0.1, target="flow", action="freeze and replace", skip=0, seconds=3 * LEASE_S)
KILL_FLOW = Fault(updates=NUM_STEPS - 4, after_s=0.1, target="flow", action="kill", skip=0, seconds=0.1)
ALL_FAULTS = pytest.param((DROP, KILL_ENGINE, REPLACE, KILL_FLOW), id="four", marks=pytest.mark.slow)


def test_seed_and_run_number_determine_the_schedule() -> None:
    schedules = {(seed, number): draw_schedule(seed, number, 8) for seed in range(3) for number in range(4)}
    assert all(draw_schedule(*key, 8) == schedule for key, schedule in schedules.items())
    assert len({schedule.faults for schedule in schedules.values()}) == len(schedules)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("faults", [pytest.param((DROP, REPLACE), id="two"), ALL_FAULTS])
def test_run_under_faults(tmp_path: Path, faults: tuple[Fault, ...]) -> None:
    with running_testbed(tmp_path) as testbed:
        verdict = judge(testbed, Schedule(0, "sft", "s3", faults), run_reference(testbed, "sft"))
    assert not verdict.problems
    assert [injected.fault for injected in verdict.run.injected] == list(faults)
    assert processes_of(str(tmp_path)) == []
