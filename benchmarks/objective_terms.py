"""Cost of eight concurrent terms, against the same terms in one callback; and cost of separate gradients.

A loss for the SDK's `forward_backward_custom` calls its terms sequentially. Here, terms that wait run in threads and
terms that compute run in processes. The second row is the cost of knowing the gradient of every term: eight
differentiable terms are evaluated separately, in threads as in a run, then summed and compared. The peer is one
forward and backward pass of their sum.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.rows import Row
from objectives.batch import Batch, Outputs
from objectives.evaluate import Evaluation, evaluate_base
from objectives.gradients.linearize import linearize
from objectives.objective import Objective
from objectives.reductions import reduce
from objectives.term import Regularizer, regularizer

BUDGET_MS, BUDGET_RATIO = 150.0, 2.0


@regularizer("bench_waits", "monitor")
def waits(outputs: Outputs, batch: Batch, *, seconds: float) -> dict[str, float]:
    """Wait, as for a database."""
    time.sleep(seconds)
    return {}


@regularizer("bench_computes", "monitor")
def computes(outputs: Outputs, batch: Batch, *, seconds: float) -> dict[str, float]:
    """Compute for some seconds of process time, so that waiting for the processor does not count."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        sum(range(1000))
    return {}


@regularizer("bench_power")
def power(outputs: Outputs, batch: Batch, *, exponent: float) -> Tensor:
    """Differentiable term with one transcendental function per token."""
    return (exponent * outputs.logprobs_DT).exp()


def measure(
    *, repetitions: int = 5, seconds: float = 1.0, shape: tuple[int, int] = (128, 1024), num_waiting: int = 4
) -> list[Row]:
    """Return a row for concurrent terms and one for separate gradients.

    Args:
        seconds: duration of each term that waits or computes.
        shape: number of datums and tokens per datum.
        num_waiting: number of terms that wait; as many compute.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a run
    try:
        batch, outputs = _batch(*shape)
        return [
            _concurrent(batch, outputs, repetitions, seconds, num_waiting),
            _separate_gradients(batch, outputs, repetitions),
        ]
    finally:
        torch.set_num_threads(threads)


def _concurrent(batch: Batch, outputs: Outputs, repetitions: int, seconds: float, num_waiting: int) -> Row:
    entries = [
        {"name": f"{fn}_{k}", "fn": f"bench_{fn}", "params": {"seconds": seconds}, "execution": execution}
        for fn, execution in (("waits", "thread"), ("computes", "process"))
        for k in range(num_waiting)
    ]
    figures: list[tuple[float, float]] = []
    with Objective(regularizers=entries) as objective, ThreadPoolExecutor(len(entries)) as pool:

        def ours() -> list[Evaluation]:
            run = objective.runner.evaluate
            return list(pool.map(run, objective.regularizers, repeat(outputs), repeat(batch), repeat(False)))

        def peer() -> list[object]:
            return [entry.term(outputs, batch, **entry.params) for entry in objective.regularizers]

        ours()  # starts the processes
        for _ in tqdm(range(repetitions), desc="objective_terms: concurrent"):
            figures.append((_seconds(ours), _seconds(peer)))
    concurrent_s, sequential_s = (list(column) for column in zip(*figures, strict=True))
    cores = len(os.sched_getaffinity(0))
    least = max(seconds, num_waiting * seconds / cores)
    return Row(
        f"objective_terms: {len(entries)} terms of {seconds:g} s",
        "s",
        concurrent_s,
        sequential_s,
        "the same terms in one callback, sequentially",
        f"{num_waiting} wait in threads, {num_waiting} compute in processes; {cores} cores need at least {least:g} s",
    )


def _separate_gradients(batch: Batch, outputs: Outputs, repetitions: int) -> Row:
    entries = [{"name": f"power_{k}", "fn": "bench_power", "params": {"exponent": 1 + k / 8}} for k in range(8)]
    objective = Objective(regularizers=entries)
    terms: Sequence[Regularizer] = objective.regularizers

    def ours() -> Tensor:
        evaluations = pool.map(objective.runner.evaluate, terms, repeat(outputs), repeat(batch), repeat(False))
        rows = [(evaluation, 0.1) for evaluation in evaluations]
        return linearize(evaluate_base(objective.base, outputs, batch, False), rows).loss_weights_DT

    def peer() -> Tensor:
        logprobs_DT = outputs.logprobs_DT.detach().requires_grad_()
        leaf = replace(outputs, logprobs_DT=logprobs_DT)
        total = -(logprobs_DT * batch.weights_DT).sum()
        for entry in terms:
            total = total + 0.1 * reduce(entry.term(leaf, batch, **entry.params), batch, "token_mean")
        return -torch.autograd.grad(total, logprobs_DT)[0]

    # A run, too, evaluates its terms in threads and uses one thread per tensor operation.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        torch.testing.assert_close(ours(), peer())
        figures = [(1000 * _seconds(ours), 1000 * _seconds(peer)) for _ in range(4 * repetitions)]
    separate_ms, sum_ms = (list(column) for column in zip(*figures, strict=True))
    row = Row(
        f"objective_terms: 8 separate gradients, compared, {batch.num_datums} x {batch.num_tokens // batch.num_datums}",
        "ms",
        separate_ms,
        sum_ms,
        "forward and backward of their sum",
    )
    holds = median(separate_ms) < BUDGET_MS and median(row.ratios) <= BUDGET_RATIO
    verdict = "holds" if holds else "EXCEEDED"
    return replace(row, note=f"budget {BUDGET_RATIO:g}x and {BUDGET_MS:g} ms: {verdict}")


def _batch(num_datums: int, num_tokens: int) -> tuple[Batch, Outputs]:
    generator = torch.Generator().manual_seed(0)
    size = num_datums * num_tokens
    offsets_D = torch.arange(num_datums + 1) * num_tokens
    weights_DT = (torch.arange(size) % num_tokens >= num_tokens // 4).float() / num_tokens
    tokens_DT = torch.randint(1000, (size,), generator=generator)
    logprobs_DT = -3 * torch.rand(size, generator=generator)
    return Batch(tokens_DT, weights_DT, offsets_D, ("",) * num_datums), Outputs(logprobs_DT)


def _seconds(function: Callable[[], object]) -> float:
    started = perf_counter()
    function()
    return perf_counter() - started
