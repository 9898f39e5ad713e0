"""Cycles of a service that starts training on clock ticks: a step of one pass against a step of two passes.

The hosted service works in cycles. Two passes need two cycles, because the loss weights of the second pass depend on
the response to the first; one pass needs one cycle. The engine's `--clock-cycle` emulates the cycles.
"""

from __future__ import annotations

from contextlib import ExitStack
from time import perf_counter

import tinker
from tqdm import tqdm

from benchmarks.rows import Row
from benchmarks.scratch import KEY, bench_engine, scratch_home, solutions
from objectives.objective import Objective
from objectives.one_pass.planner import OnePass
from objectives.sdk.training_loop import forward_backward_regularized

ADAM = tinker.AdamParams(learning_rate=1e-4)
TERMS = ({"name": "confidence", "weight": 0.1}, {"name": "magnitude", "weight": 0.1})


def measure(*, repetitions: int = 3, steps: int = 5, cycle_s: float = 1.0) -> list[Row]:
    """Return one row: cycles per step; a repetition is the mean of `steps` steps."""
    ours, peer = [], []
    with (
        scratch_home() as folder,
        bench_engine(folder, "tiny", cycle_s) as url,
        tinker.ServiceClient(base_url=url, api_key=KEY) as session,
        ExitStack() as contexts,
    ):
        one, two = (
            (
                _trainer(session),
                contexts.enter_context(OnePass(Objective(regularizers=TERMS, backend=backend), session)),
            )
            for backend in ("server", "client")
        )
        for setup in (one, two):
            _cycles(*setup, steps=1, cycle_s=cycle_s)
        for _ in tqdm(range(repetitions), desc="one_pass"):
            ours.append(_cycles(*one, steps=steps, cycle_s=cycle_s))
            peer.append(_cycles(*two, steps=steps, cycle_s=cycle_s))
    note = f"engine with --clock-cycle {cycle_s:g}; cross-entropy, {', '.join(str(term['name']) for term in TERMS)}"
    return [Row("one_pass: a step of one pass, 4 x 64 tokens", "cycles", ours, peer, "a step of two passes", note)]


def _trainer(session: tinker.ServiceClient) -> tinker.TrainingClient:
    return session.create_lora_training_client("tiny", rank=8, seed=0).result()


def _cycles(trainer: tinker.TrainingClient, objective: OnePass, *, steps: int, cycle_s: float) -> float:
    """Return the cycles per step; each step starts after the response to the previous one."""
    data = solutions(trainer.get_tokenizer(), 4, 64)
    started = perf_counter()
    for step in range(steps):
        pending = forward_backward_regularized(trainer, data, objective, step=step, num_steps=steps)
        updated = trainer.optim_step(ADAM)
        pending.result()
        updated.result()
    return (perf_counter() - started) / cycle_s / steps
