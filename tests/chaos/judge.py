"""Verdict on a run under faults: its outputs compared with those of a reference run."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.checks import Outputs, collect_outputs, differences, leftovers
from chaos.runner import ChaosRun, run_schedule
from chaos.schedule import Schedule
from chaos.servers import Testbed


@dataclass(frozen=True, slots=True)
class Verdict:
    """Run and the problems of its outputs; a run without problems survived."""

    run: ChaosRun
    problems: tuple[str, ...]


def judge(testbed: Testbed, schedule: Schedule, reference: Outputs) -> Verdict:
    """Run a schedule and compare its outputs with those of the reference run."""
    run = run_schedule(testbed, schedule, f"run-{schedule.number}")
    if run.failure:
        return Verdict(run, (run.failure,))
    try:
        outputs = collect_outputs(testbed, run)
    except (AssertionError, ValueError, LookupError, OSError) as error:
        return Verdict(run, (f"its outputs cannot be read: {error!r}",))
    return Verdict(run, (*differences(schedule.kind, outputs, reference), *leftovers(testbed, run)))


def run_reference(testbed: Testbed, kind: str) -> Outputs:
    """Run a kind without faults and return its outputs."""
    run = run_schedule(testbed, Schedule(-1, kind, "local", ()), f"reference-{kind}")
    assert not run.failure, (run.failure, run.exits[-1:])
    assert not run.exits, run.exits
    outputs = collect_outputs(testbed, run)
    problems = [*differences(kind, outputs, outputs), *leftovers(testbed, run)]
    assert not problems, problems
    return outputs
