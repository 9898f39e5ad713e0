"""What Prefect costs on the critical path of a training step.

A step of `flows.sft` is eight tasks between one answer of the service and the next: forward, three terms side by side,
linearize, forward_backward, optim_step, metrics. They run here against a service that answers at once, in a real flow
on a real Prefect server with a real MLflow store; the peer is the same functions without Prefect. The batch and the
features of a step are ready before its clock starts, as they are in a run: they are made while the service works on the
step before.

The service waits for the flow from its answer to the forward pass until the update is sent: that is the critical path.
The tasks that follow wait for requests that are sent, and run while the service works. Both are timed, and in a last
row the step with its batch and features too, so that nothing hides anything. What Prefect adds depends on the processor
as much as on the flow, so eight task runs without anything in them are measured beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from operator import attrgetter
from time import perf_counter

import tinker
from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings
from tinker_cookbook.supervised.types import SupervisedDataset
from tqdm import tqdm
from transformers import AutoTokenizer

from benchmarks.empty_service import EmptyService
from benchmarks.rows import Row
from benchmarks.scratch import scratch_home, solutions
from blocks import MLflowTracking
from blocks.home import home
from blocks.processes import local_prefect_server
from engine.models import resolve_model
from flows.command_line import keep_prefect_off_the_terminal
from flows.step import compute_linearized, enqueue_forward_ahead, load_ahead
from objectives.losses import compute_mean_nll
from objectives.objective import Objective
from tasks.data import DataSource, load_batch
from tasks.forward import enqueue_forward, forward_logprobs
from tasks.metrics import MetricsLog, log_metrics
from tasks.options import step_task, whole
from tasks.terms import compute_term, linearize_terms, prepare_term
from tasks.update import enqueue_update, forward_backward, optim_step

BUDGET_MS = 30.0
WARM_UP = 5
SMALL, LARGE = (16, 128), (128, 1024)
NUM_STEPS = 1_000_000
ADAM = tinker.AdamParams(learning_rate=1e-4)
REGULARIZERS = ("topology", "logic", "confidence")


@dataclass(frozen=True, slots=True)
class Bench:
    """What every step of a measurement uses."""

    client: tinker.TrainingClient
    source: DataSource
    objective: Objective
    log: MetricsLog
    numbers: Iterator[int]


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds from the forward pass's answer until the update is sent, and until the last task has ended."""

    critical_ms: float
    all_ms: float


class OneBatch(SupervisedDataset):
    """The same batch at every step: reading data is not what is measured."""

    def __init__(self, datums: list[tinker.Datum]) -> None:
        self._datums = datums

    def get_batch(self, index: int) -> list[tinker.Datum]:
        return self._datums

    def __len__(self) -> int:
        return NUM_STEPS

    def set_epoch(self, seed: int = 0) -> None:
        """There is nothing to shuffle."""


def measure(*, repetitions: int = 10, steps: int = 10, large_steps: int = 3) -> list[Row]:
    """Rows for two batch sizes, and for a whole step with nothing ahead of it.

    Args:
        steps: measured steps of each side per repetition.
        large_steps: the same with the large batch.
    """
    objective = Objective(regularizers=[{"name": name, "weight": 0.1} for name in REGULARIZERS])
    rows: list[Row] = []
    with scratch_home(), local_prefect_server() as url, temporary_settings({PREFECT_API_URL: url}):
        keep_prefect_off_the_terminal()
        tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny", home() / "cache"))
        log, numbers = _new_log(), count()
        for shape, steps_of, cold in ((SMALL, steps, False), (LARGE, large_steps, False), (SMALL, steps, True)):
            source = DataSource(OneBatch(solutions(tokenizer, *shape)), None, tokenizer, seed=0)
            bench = Bench(EmptyService(*shape).as_client(), source, objective, log, numbers)
            rows.extend(_measure(bench, repetitions, steps_of, shape, cold))
        log.flush()
    return rows


def _new_log() -> MetricsLog:
    tracking = MLflowTracking()
    client = tracking.get_client()
    return MetricsLog(client, client.create_run(tracking.experiment_id(client)).info.run_id)


def _measure(bench: Bench, repetitions: int, steps: int, shape: tuple[int, int], cold: bool) -> list[Row]:
    """Time steps with and without Prefect, in turn, inside one flow."""
    size = f"{shape[0]} x {shape[1]} tokens"
    rounds_RS: list[list[tuple[Times, Times, float]]] = []

    @flow(name="step-overhead", flow_run_name=size)
    def run_steps() -> None:
        for _ in range(WARM_UP):
            _step(bench, cold)
            _plain_step(bench, cold)
        for _ in tqdm(range(repetitions), desc=f"step_overhead: {size}"):
            rounds_RS.append([(_step(bench, cold), _plain_step(bench, cold), _empty_tasks()) for _ in range(steps)])

    run_steps()
    empty = statistics.median(empty for round_S in rounds_RS for _, _, empty in round_S)

    def row(what: str, of: Callable[[Times], float], budget: bool = False) -> Row:
        ours_RS = [[of(ours) for ours, _, _ in round_S] for round_S in rounds_RS]
        peer_RS = [[of(peer) for _, peer, _ in round_S] for round_S in rounds_RS]
        added = statistics.median(chain.from_iterable(ours_RS)) - statistics.median(chain.from_iterable(peer_RS))
        verdict = f" (budget {BUDGET_MS:g} ms: {'holds' if added <= BUDGET_MS else 'EXCEEDED'})" if budget else ""
        return Row(
            f"step_overhead: {what}, {size}",
            "ms",
            ours=[statistics.median(steps_S) for steps_S in ours_RS],
            peer=[statistics.median(steps_S) for steps_S in peer_RS],
            peer_name="the same functions without Prefect",
            note=f"Prefect adds {added:.1f} ms{verdict}, median of {repetitions * steps} steps; "
            f"eight empty tasks one by one take {empty:.1f} ms",
        )

    if cold:
        return [row("whole step, 12 tasks", attrgetter("all_ms"))]
    return [
        row("critical path of 8 tasks", attrgetter("critical_ms"), budget=shape == SMALL),
        row("all 8 tasks", attrgetter("all_ms")),
    ]


def _step(bench: Bench, cold: bool) -> Times:
    """One step as the flow does it."""
    step = next(bench.numbers)
    started = perf_counter()
    ahead = load_ahead(bench.source.load(step, bench.client)[0], bench.objective, None, step, passes=2, share=1.0)
    forward = enqueue_forward_ahead(bench.client, ahead)
    batch = forward.batch
    if not cold:
        for _, features in ahead.terms:
            if features:
                features.result()
        started = perf_counter()
    linearized = compute_linearized(bench.objective, ahead, forward, NUM_STEPS, first=False)
    update = enqueue_update(bench.client, batch, linearized.loss_weights_DT, ADAM)
    assert update.optim_step is not None
    sent = perf_counter()
    outputs = forward_backward(update.forward_backward, whole(batch))
    metrics = optim_step(update.optim_step) | linearized.metrics
    metrics["train_mean_nll"] = compute_mean_nll(outputs.logprobs_DT, batch.weights_DT)
    log_metrics(bench.log, step, whole(metrics))
    return Times(1000 * (sent - started), 1000 * (perf_counter() - started))


def _plain_step(bench: Bench, cold: bool) -> Times:
    """The same functions in the same order, called as they are."""
    step = next(bench.numbers)
    started = perf_counter()
    batch = load_batch.fn(bench.source, step)
    features = [
        prepare_term.fn(bench.objective.runner, each, batch) if each.term.prepare else None
        for each in bench.objective.regularizers
    ]
    pending = enqueue_forward(bench.client, batch)
    if not cold:
        started = perf_counter()
    outputs = forward_logprobs.fn(pending, batch)
    evaluated = [
        (compute_term.fn(bench.objective.runner, each, outputs, batch, made, False), each.weight_at(step, NUM_STEPS))
        for each, made in zip(bench.objective.regularizers, features, strict=True)
    ]
    linearized = linearize_terms.fn(bench.objective, outputs, batch, evaluated, step)
    update = enqueue_update(bench.client, batch, linearized.loss_weights_DT, ADAM)
    assert update.optim_step is not None
    sent = perf_counter()
    outputs = forward_backward.fn(update.forward_backward, batch)
    metrics = optim_step.fn(update.optim_step) | linearized.metrics
    metrics["train_mean_nll"] = compute_mean_nll(outputs.logprobs_DT, batch.weights_DT)
    log_metrics.fn(bench.log, step, metrics)
    return Times(1000 * (sent - started), 1000 * (perf_counter() - started))


@step_task(name="empty")
def _empty_task() -> None:
    """Nothing."""


def _empty_tasks() -> float:
    """Eight task runs that do nothing; milliseconds."""
    started = perf_counter()
    for _ in range(8):
        _empty_task()
    return 1000 * (perf_counter() - started)
