"""A sample of `make chaos`: one run, one of each sort of fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.judge import judge, undisturbed
from chaos.schedule import NUM_STEPS, Fault, Schedule
from chaos.servers import processes_of, running_stage

FAULTS = (
    Fault(updates=5, after_s=0.2, target="engine", action="drop answer", skip=1, seconds=0.0),
    Fault(updates=9, after_s=0.1, target="engine", action="kill", skip=0, seconds=0.5),
    Fault(updates=NUM_STEPS - 4, after_s=0.1, target="flow", action="kill", skip=0, seconds=0.1),
)


@pytest.mark.timeout(600)
def test_three_faults(tmp_path: Path) -> None:
    with running_stage(tmp_path) as stage:
        judged = judge(stage, Schedule(0, "sft", "s3", FAULTS), undisturbed(stage, "sft"))
    assert not judged.problems
    assert [each.fault for each in judged.played.injected] == list(FAULTS)
    assert processes_of(str(tmp_path)) == []
