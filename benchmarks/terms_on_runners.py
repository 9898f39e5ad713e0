"""Eight waiting terms on each task runner, against the slowest of them.

The terms wait, as for a database or a service, so that they need no processor. A step evaluates all of them
concurrently; its time beyond that of the slowest term is the overhead of Prefect, the task runner and the transfer. The
runner has a worker for each term, and steps before the measured ones warm it up. The peer is the slowest term, timed in
its worker.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from contextlib import closing
from statistics import median
from time import perf_counter
from typing import Literal

import torch
from prefect import flow
from tqdm import tqdm

from benchmarks.rows import Row
from benchmarks.scratch import scratch_home, scratch_prefect_server
from flows.config.train import TaskRunnerConfig
from flows.runs.cli import silence_console_logs
from flows.runs.task_runner import open_task_runner
from objectives.batch import Batch, Outputs
from objectives.objective import Objective
from objectives.term import regularizer
from tasks.common.event_loop import open_workers
from tasks.training.terms import TaskTermExecutor

Kind = Literal["threads", "processes", "dask", "ray"]
LIMIT_S = 0.3
SHAPE = (16, 128)


@regularizer("bench_waits_on_runner", "monitor")
def waits(outputs: Outputs, batch: Batch, *, seconds: float) -> dict[str, float]:
    """Wait, as for a service that scores the logprobs."""
    start = perf_counter()
    time.sleep(seconds)
    return {"seconds": perf_counter() - start}


def measure(
    *,
    kinds: Sequence[Kind] = ("threads", "processes", "dask", "ray"),
    repetitions: int = 10,
    seconds: float = 1.0,
    num_terms: int = 8,
) -> list[Row]:
    """Return a row for each task runner that is installed.

    Args:
        seconds: time that each term waits.
    """
    with scratch_home(), scratch_prefect_server():
        silence_console_logs()
        return [
            _row(kind, repetitions, seconds, num_terms)
            for kind in kinds
            if kind in ("threads", "processes") or importlib.util.find_spec(f"prefect_{kind}")
        ]


def _row(kind: Kind, repetitions: int, seconds: float, num_terms: int) -> Row:
    steps: list[tuple[float, float]] = []

    @flow(name="terms-on-runners", flow_run_name=kind)
    def run_steps() -> None:
        terms = [
            {"name": f"waits_{number}", "fn": "bench_waits_on_runner", "params": {"seconds": seconds}}
            for number in range(num_terms)
        ]
        config = TaskRunnerConfig(kind=kind, workers=num_terms)
        with (
            Objective(regularizers=terms) as objective,
            open_workers(),
            open_task_runner(config) as task_runner,
            closing(TaskTermExecutor(objective.runner, task_runner, objective.regularizers)) as executor,
        ):
            for _ in range(2):
                _step(executor, objective)
            for _ in tqdm(range(repetitions), desc=f"terms_on_runners: {kind}"):
                steps.append(_step(executor, objective))

    run_steps()
    excess = [total - slowest for total, slowest in steps]
    spread = f"from {min(excess):.2f} to {max(excess):.2f}"
    verdict = "holds" if median(excess) <= LIMIT_S else "EXCEEDED"
    return Row(
        f"terms_on_runners: {num_terms} terms that wait {seconds:g} s, {kind}",
        "s",
        ours=[total for total, _ in steps],
        peer=[slowest for _, slowest in steps],
        peer_name="the slowest term",
        note=f"{median(excess):.2f} s over the slowest ({spread}; limit {LIMIT_S:g} s: {verdict})",
    )


def _step(executor: TaskTermExecutor, objective: Objective) -> tuple[float, float]:
    """Evaluate all terms; return the seconds of the step and of the slowest term."""
    num_rows, num_tokens = SHAPE
    num_targets = num_rows * num_tokens
    offsets_D = torch.arange(num_rows + 1) * num_tokens
    batch = Batch(torch.zeros(num_targets, dtype=torch.int64), torch.ones(num_targets), offsets_D)
    outputs = Outputs(torch.full((num_targets,), -1.0))
    start = perf_counter()
    pending = [executor.evaluate(term, None, outputs, batch, False) for term in objective.regularizers]
    evaluations = [wait() for wait in pending]
    return perf_counter() - start, max(evaluation.metrics["seconds"] for evaluation in evaluations)
