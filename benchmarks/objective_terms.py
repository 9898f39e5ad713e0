"""What eight terms cost side by side, against the same eight in one callback; and what their gradients cost apart.

A loss for the SDK's `forward_backward_custom` calls its terms one after the other. Here each has its place: those that
wait are in threads, those that compute in processes of their own. The second row is the price of knowing every term's
gradient: eight differentiable terms evaluated apart, in threads as in a run, summed and compared, against one backward
of their plain sum.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat
from time import perf_counter

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.rows import Row
from objectives.batch import Batch, Outputs
from objectives.evaluate import Evaluation, evaluate_base
from objectives.linearize import linearize
from objectives.objective import Objective
from objectives.reductions import reduce
from objectives.regularizer import Regularizer
from objectives.term import regularizer

BUDGET_MS, BUDGET_RATIO = 150.0, 2.0


@regularizer("bench_waits", "monitor")
def waits(outputs: Outputs, batch: Batch, *, seconds: float) -> dict[str, float]:
    """Waits, as for a database."""
    time.sleep(seconds)
    return {}


@regularizer("bench_computes", "monitor")
def computes(outputs: Outputs, batch: Batch, *, seconds: float) -> dict[str, float]:
    """Computes for so many seconds of this process's own time, however many others want the processor."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        sum(range(1000))
    return {}


@regularizer("bench_power")
def power(outputs: Outputs, batch: Batch, *, exponent: float) -> Tensor:
    """A differentiable term of one transcendental function per token."""
    return (exponent * outputs.logprobs_DT).exp()


def measure(
    *, repetitions: int = 5, seconds: float = 1.0, shape: tuple[int, int] = (128, 1024), num_waiting: int = 4
) -> list[Row]:
    """A row for terms side by side and one for gradients apart.

    Args:
        seconds: of each of the terms that wait or compute.
        shape: datums and tokens of each.
        num_waiting: how many wait; as many compute.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a run
    try:
        batch, outputs = _batch(*shape)
        return [_side_by_side(batch, outputs, repetitions, seconds, num_waiting), _apart(batch, outputs, repetitions)]
    finally:
        torch.set_num_threads(threads)


def _side_by_side(batch: Batch, outputs: Outputs, repetitions: int, seconds: float, num_waiting: int) -> Row:
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
            return [each.term(outputs, batch, **each.params) for each in objective.regularizers]

        ours()  # the processes are started
        for _ in tqdm(range(repetitions), desc="objective_terms: side by side"):
            figures.append((_seconds(ours), _seconds(peer)))
    took, in_turn = (list(column) for column in zip(*figures, strict=True))
    cores = len(os.sched_getaffinity(0))
    least = max(seconds, num_waiting * seconds / cores)
    return Row(
        f"objective_terms: {len(entries)} terms of {seconds:g} s",
        "s",
        took,
        in_turn,
        "the same in one callback, in turn",
        f"{num_waiting} wait in threads, {num_waiting} compute in processes; {cores} cores need {least:g} s at least",
    )


def _apart(batch: Batch, outputs: Outputs, repetitions: int) -> Row:
    entries = [{"name": f"power_{k}", "fn": "bench_power", "params": {"exponent": 1 + k / 8}} for k in range(8)]
    objective = Objective(regularizers=entries)
    terms: Sequence[Regularizer] = objective.regularizers

    def ours() -> Tensor:
        found = pool.map(objective.runner.evaluate, terms, repeat(outputs), repeat(batch), repeat(False))
        rows = [(each, 0.1) for each in found]
        return linearize(evaluate_base(objective, outputs, batch, False), rows).loss_weights_DT

    def peer() -> Tensor:
        logprobs_DT = outputs.logprobs_DT.detach().requires_grad_()
        leaf = replace(outputs, logprobs_DT=logprobs_DT)
        total = -(logprobs_DT * batch.weights_DT).sum()
        for each in terms:
            total = total + 0.1 * reduce(each.term(leaf, batch, **each.params), batch, "token_mean")
        return -torch.autograd.grad(total, logprobs_DT)[0]

    # As in a run, which has threads for its terms, and one for each of their tensors.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        torch.testing.assert_close(ours(), peer())
        figures = [(1000 * _seconds(ours), 1000 * _seconds(peer)) for _ in range(4 * repetitions)]
    took, plain = (list(column) for column in zip(*figures, strict=True))
    row = Row(
        f"objective_terms: 8 gradients apart and compared, {batch.num_datums} x {batch.num_tokens // batch.num_datums}",
        "ms",
        took,
        plain,
        "forward and backward of their plain sum",
    )
    holds = sorted(took)[len(took) // 2] < BUDGET_MS and sorted(row.ratios)[len(took) // 2] <= BUDGET_RATIO
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
