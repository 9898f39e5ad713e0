"""Granularity of Prefect task runs: every task of a step, a whole step, or the steps between two checkpoints.

Prefect stores a row and several events per task run, so long runs need a coarser granularity.
"""

from __future__ import annotations

from collections.abc import Callable

from prefect.context import FlowRunContext

from flows.config.train import Granularity
from tasks.common.task import inline_tasks, opaque_argument, step_task


def run_step(granularity: Granularity, step: int, run: Callable[[int], None]) -> None:
    """Run a step, as one task run if the granularity is `step`."""
    if granularity == "step":
        _step(opaque_argument(run), step)
    else:
        run(step)
    if context := FlowRunContext.get():
        # Prefect would keep the state of every result until the flow ends, to track the origin of arguments.
        context.run_results.clear()


def run_segment(granularity: Granularity, steps: range, run: Callable[[range], bool]) -> bool:
    """Run the steps between two checkpoints, as one task run if the granularity is `segment`; return its result."""
    return _segment(opaque_argument(run), steps) if granularity == "segment" else run(steps)


@step_task(name="step", task_run_name="step-{step}")
def _step(run: Callable[[int], None], step: int) -> None:
    with inline_tasks():
        run(step)


@step_task(name="segment", task_run_name="segment-{steps.start}-{steps.stop}")
def _segment(run: Callable[[range], bool], steps: range) -> bool:
    with inline_tasks():
        return run(steps)
