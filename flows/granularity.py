"""How much of a run has a task run of its own: every task of a step, a step, or what lies between two checkpoints.

Prefect keeps a row and several events per task run; a run of a million steps is read, and stored, more coarsely.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prefect.context import FlowRunContext

from tasks.options import folded, step_task, whole

Granularity = Literal["task", "step", "segment"]


def run_step(granularity: Granularity, step: int, run: Callable[[int], None]) -> None:
    """Run a step, as one task run where each has one."""
    if granularity == "step":
        _step(whole(run), step)
    else:
        run(step)
    if context := FlowRunContext.get():
        # Prefect keeps the state of every result for as long as the flow runs, to know where an argument came from.
        context.run_results.clear()


def run_segment(granularity: Granularity, steps: range, run: Callable[[range], None]) -> None:
    """Run the steps between two checkpoints, as one task run where each segment has one."""
    if granularity == "segment":
        _segment(whole(run), steps)
    else:
        run(steps)


@step_task(name="step", task_run_name="step-{step}")
def _step(run: Callable[[int], None], step: int) -> None:
    with folded():
        run(step)


@step_task(name="segment", task_run_name="segment-{steps.start}-{steps.stop}")
def _segment(run: Callable[[range], None], steps: range) -> None:
    with folded():
        run(steps)
