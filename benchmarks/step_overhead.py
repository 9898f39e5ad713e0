"""Cost of Prefect on the critical path of a training step.

A step of `flows.sft` has eight tasks: forward, three concurrent terms, linearize, forward_backward, optim_step and
metrics. They run here against a service that responds immediately, in a real flow on a real Prefect server with a real
MLflow store. The peer is the same functions without Prefect. The batch and the features of a step are ready before its
clock starts: a run, too, prepares them while the service computes the previous step.

The critical path is the time the service waits for the flow: from the response to the forward pass until the update is
sent. The later tasks wait for requests that are already sent and run while the service computes. The rows time the
critical path, all eight tasks, and the whole step with batch and features. The overhead depends on the processor, so
eight empty task runs are measured for comparison.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, count
from operator import attrgetter
from time import perf_counter

import tinker
from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner
from tinker_cookbook.supervised.types import SupervisedDataset
from tqdm import tqdm
from transformers import AutoTokenizer

from benchmarks.empty_service import EmptyService
from benchmarks.rows import Row
from benchmarks.scratch import scratch_home, scratch_prefect_server, solutions
from blocks import MLflowTracking
from blocks.files.local import home
from engine.models import resolve_model
from flows.runs.cli import silence_console_logs
from flows.training.step import prepare_batch
from objectives.execution.term_loop import Features, StepPosition, evaluate_terms
from objectives.gradients.linearize import WeightedTerm
from objectives.losses import compute_mean_nll
from objectives.objective import Objective
from tasks.common.event_loop import open_workers
from tasks.common.task import opaque_argument, step_task
from tasks.supervised.dataset import SupervisedSource, load_batch
from tasks.training.forward_backward import (
    enqueue_forward,
    enqueue_update,
    forward_backward,
    forward_logprobs,
    optim_step,
)
from tasks.training.terms import TaskTermExecutor, compute_term, linearize_task, prepare_term
from tasks.training.tracking.metrics import MetricsLog, log_metrics

BUDGET_MS = 30.0
WARM_UP = 5
SMALL, LARGE = (16, 128), (128, 1024)
NUM_STEPS = 1_000_000
ADAM = tinker.AdamParams(learning_rate=1e-4)
REGULARIZERS = ("topology", "logic", "confidence")


@dataclass(frozen=True, slots=True)
class Bench:
    """Objects shared by every step of a measurement."""

    client: tinker.TrainingClient
    source: SupervisedSource
    objective: Objective
    executor: TaskTermExecutor
    log: MetricsLog
    numbers: Iterator[int]


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds until the update is sent, and until the last task ends.

    They start at the response to the forward pass, or, with `is_cold`, before the batch is loaded.
    """

    critical_ms: float
    all_ms: float


class OneBatch(SupervisedDataset):
    """Dataset that returns the same batch at every step, so that reading data is not measured."""

    def __init__(self, datums: list[tinker.Datum]) -> None:
        self._datums = datums

    def get_batch(self, index: int) -> list[tinker.Datum]:
        return self._datums

    def __len__(self) -> int:
        return NUM_STEPS

    def set_epoch(self, seed: int = 0) -> None:
        """Do nothing: there is only one batch."""


def measure(*, repetitions: int = 10, steps: int = 10, large_steps: int = 3) -> list[Row]:
    """Return rows for two batch sizes, and one for a whole step with nothing prepared ahead.

    Args:
        steps: measured steps of each side per repetition.
        large_steps: measured steps of each side per repetition with the large batch.
    """
    objective = Objective(regularizers=[{"name": name, "weight": 0.1} for name in REGULARIZERS])
    rows: list[Row] = []
    executor = TaskTermExecutor(objective.runner, ThreadPoolTaskRunner(), objective.regularizers)
    with (
        scratch_home(),
        scratch_prefect_server(),
        open_workers(),
        closing(executor),
    ):
        silence_console_logs()
        tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny", home() / "cache"))
        log, numbers = _new_log(), count()
        for shape, steps_of, is_cold in ((SMALL, steps, False), (LARGE, large_steps, False), (SMALL, steps, True)):
            source = SupervisedSource(OneBatch(solutions(tokenizer, *shape)), None, tokenizer, seed=0)
            bench = Bench(EmptyService(*shape).as_client(), source, objective, executor, log, numbers)
            rows.extend(_measure(bench, repetitions, steps_of, shape, is_cold))
        log.flush()
    return rows


def _new_log() -> MetricsLog:
    tracking = MLflowTracking()
    client = tracking.get_client()
    return MetricsLog(client, client.create_run(tracking.experiment_id(client)).info.run_id)


def _measure(bench: Bench, repetitions: int, steps: int, shape: tuple[int, int], is_cold: bool) -> list[Row]:
    """Time steps with and without Prefect, in turn, inside one flow."""
    size = f"{shape[0]} x {shape[1]} tokens"
    rounds_RS: list[list[tuple[Times, Times, float]]] = []

    @flow(name="step-overhead", flow_run_name=size)
    def run_steps() -> None:
        for _ in range(WARM_UP):
            _step(bench, is_cold)
            _plain_step(bench, is_cold)
        for _ in tqdm(range(repetitions), desc=f"step_overhead: {size}"):
            rounds_RS.append(
                [(_step(bench, is_cold), _plain_step(bench, is_cold), _empty_tasks()) for _ in range(steps)]
            )

    run_steps()
    empty = statistics.median(empty for round_S in rounds_RS for _, _, empty in round_S)

    def row(part: str, time_of: Callable[[Times], float], budget: bool = False) -> Row:
        ours_RS = [[time_of(ours) for ours, _, _ in round_S] for round_S in rounds_RS]
        peer_RS = [[time_of(peer) for _, peer, _ in round_S] for round_S in rounds_RS]
        added = statistics.median(chain.from_iterable(ours_RS)) - statistics.median(chain.from_iterable(peer_RS))
        verdict = f" (budget {BUDGET_MS:g} ms: {'holds' if added <= BUDGET_MS else 'EXCEEDED'})" if budget else ""
        return Row(
            f"step_overhead: {part}, {size}",
            "ms",
            ours=[statistics.median(steps_S) for steps_S in ours_RS],
            peer=[statistics.median(steps_S) for steps_S in peer_RS],
            peer_name="the same functions without Prefect",
            note=f"Prefect adds {added:.1f} ms{verdict}, median of {repetitions * steps} steps; "
            f"eight consecutive empty tasks take {empty:.1f} ms",
        )

    if is_cold:
        return [row("whole step, 11 tasks", attrgetter("all_ms"))]
    return [
        row("critical path of 8 tasks", attrgetter("critical_ms"), budget=shape == SMALL),
        row("all 8 tasks", attrgetter("all_ms")),
    ]


def _step(bench: Bench, is_cold: bool) -> Times:
    """Run one step as the flow does."""
    step = next(bench.numbers)
    started = perf_counter()
    pending, at = bench.source.load(step, bench.client)[0], StepPosition(step, NUM_STEPS)
    prepared = prepare_batch(pending, bench.objective, None, bench.executor, at, passes=2)
    batch = prepared.batch.result()
    forward = enqueue_forward(bench.client, batch)
    if not is_cold:
        for term in prepared.terms:
            if term.features:
                term.features()
        started = perf_counter()
    outputs = prepared.outputs(forward_logprobs(forward, opaque_argument(batch)).logprobs_DT)
    linearized = evaluate_terms(bench.objective, prepared.terms, outputs, batch, bench.executor, at)
    update = enqueue_update(bench.client, batch, linearized.loss_weights_DT, ADAM)
    assert update.optim_step is not None
    sent = perf_counter()
    outputs = forward_backward(update.forward_backward, opaque_argument(batch))
    metrics = optim_step(update.optim_step) | linearized.metrics
    metrics["train_mean_nll"] = compute_mean_nll(outputs.logprobs_DT, batch.weights_DT)
    log_metrics(bench.log, step, opaque_argument(metrics))
    return Times(1000 * (sent - started), 1000 * (perf_counter() - started))


def _plain_step(bench: Bench, is_cold: bool) -> Times:
    """Run the same functions in the same order without Prefect."""
    step = next(bench.numbers)
    started = perf_counter()
    batch = load_batch.fn(bench.source, step)
    features: list[Features | None] = []
    for entry in bench.objective.regularizers:
        prepared = prepare_term.fn(bench.objective.runner, entry, batch) if entry.term.prepare else None
        features.append(_already(prepared) if entry.term.prepare else None)
    pending = enqueue_forward(bench.client, batch)
    if not is_cold:
        started = perf_counter()
    outputs = forward_logprobs.fn(pending, batch)
    scale = bench.objective.scale(batch)
    evaluated = [
        WeightedTerm(
            compute_term.fn(bench.objective.runner, entry, outputs, batch, term_features, False),
            entry.weight_at(step, NUM_STEPS),
            scale.of(entry, batch),
        )
        for entry, term_features in zip(bench.objective.regularizers, features, strict=True)
    ]
    linearized = linearize_task.fn(bench.objective, outputs, batch, evaluated, step, scale)
    update = enqueue_update(bench.client, batch, linearized.loss_weights_DT, ADAM)
    assert update.optim_step is not None
    sent = perf_counter()
    outputs = forward_backward.fn(update.forward_backward, batch)
    metrics = optim_step.fn(update.optim_step) | linearized.metrics
    metrics["train_mean_nll"] = compute_mean_nll(outputs.logprobs_DT, batch.weights_DT)
    log_metrics.fn(bench.log, step, metrics)
    return Times(1000 * (sent - started), 1000 * (perf_counter() - started))


def _already(value: object) -> Features:
    return lambda: value


@step_task(name="empty")
def _empty_task() -> None:
    """Do nothing."""


def _empty_tasks() -> float:
    """Return the milliseconds of eight consecutive empty task runs."""
    started = perf_counter()
    for _ in range(8):
        _empty_task()
    return 1000 * (perf_counter() - started)
