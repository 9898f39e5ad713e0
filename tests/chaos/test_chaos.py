"""Sample of `make chaos`: one run with one fault of each sort."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.judge import judge, run_reference
from chaos.schedule import LEASE_S, NUM_STEPS, Fault, Schedule, draw_schedule
from chaos.servers import processes_of, running_testbed

pytestmark = pytest.mark.process

FAULTS = (
    Fault(updates=5, after_s=0.2, target="engine", action="drop response", skip=1, seconds=0.0),
    Fault(updates=9, after_s=0.1, target="engine", action="kill", skip=0, seconds=0.5),
    Fault(updates=12, after_s=0.1, target="flow", action="freeze and replace", skip=0, seconds=3 * LEASE_S),
    Fault(updates=NUM_STEPS - 4, after_s=0.1, target="flow", action="kill", skip=0, seconds=0.1),
)


def test_seed_and_run_number_determine_the_schedule() -> None:
    schedules = {(seed, number): draw_schedule(seed, number, 8) for seed in range(3) for number in range(4)}
    assert all(draw_schedule(*key, 8) == schedule for key, schedule in schedules.items())
    assert len({schedule.faults for schedule in schedules.values()}) == len(schedules)


@pytest.mark.timeout(600)
def test_four_faults(tmp_path: Path) -> None:
    with running_testbed(tmp_path) as testbed:
        verdict = judge(testbed, Schedule(0, "sft", "s3", FAULTS), run_reference(testbed, "sft"))
    assert not verdict.problems
    assert [injected.fault for injected in verdict.run.injected] == list(FAULTS)
    assert processes_of(str(tmp_path)) == []
