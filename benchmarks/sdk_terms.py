"""Eight waiting terms in a loop on the SDK, against the SDK's own custom loss.

A loss for the SDK's `forward_backward_custom` calls its terms sequentially. `forward_backward_regularized` prepares
the terms concurrently while the service runs the forward pass, and evaluates them concurrently on its result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter

import tinker
import torch
from tinker import types
from torch import Tensor
from tqdm import tqdm

from benchmarks.rows import Row
from benchmarks.scratch import KEY, bench_engine, scratch_home, solutions
from objectives.batch import Batch, Outputs
from objectives.objective import Objective
from objectives.sdk.training_loop import forward_backward_regularized
from objectives.term import regularizer

BUDGET_S = 1.2


def wait(batch: Batch, *, prepare_s: float) -> tuple[()]:
    """Wait, as for a database that is asked about the data."""
    time.sleep(prepare_s)
    return ()


@regularizer("bench_sdk_waits", "monitor", prepare=wait)
def waits(outputs: Outputs, batch: Batch, *, evaluate_s: float) -> dict[str, float]:
    """Wait, as for a service that scores the logprobs."""
    time.sleep(evaluate_s)
    return {}


def measure(*, repetitions: int = 5, seconds: float = 1.0, num_terms: int = 8) -> list[Row]:
    """Return a row for terms that wait when evaluated, and one for terms that wait when prepared.

    Args:
        seconds: time that each term waits.
    """
    with (
        scratch_home() as folder,
        bench_engine(folder, "tiny") as url,
        tinker.ServiceClient(base_url=url, api_key=KEY) as session,
    ):
        trainer = session.create_lora_training_client("tiny", rank=8, seed=0).result()
        data = solutions(trainer.get_tokenizer(), 4, 64)
        return [
            _row(
                phase,
                partial(_ours, trainer, data, objective),
                partial(_peer, trainer, data, seconds, num_terms),
                repetitions,
                seconds,
                num_terms,
            )
            for phase, objective in (
                ("evaluated", _objective(num_terms, prepare_s=0.0, evaluate_s=seconds)),
                ("prepared", _objective(num_terms, prepare_s=seconds, evaluate_s=0.0)),
            )
        ]


def _objective(num_terms: int, **params: float) -> Objective:
    entries = [{"name": f"waits_{k}", "fn": "bench_sdk_waits", "params": params} for k in range(num_terms)]
    return Objective(regularizers=entries)


def _row(
    phase: str,
    ours: Callable[[], object],
    peer: Callable[[], object],
    repetitions: int,
    seconds: float,
    num_terms: int,
) -> Row:
    ours()  # warms up the engine
    figures = [(_seconds(ours), _seconds(peer)) for _ in tqdm(range(repetitions), desc=f"sdk_terms: {phase}")]
    ours_s, peer_s = (list(column) for column in zip(*figures, strict=True))
    verdict = "holds" if median(ours_s) <= BUDGET_S * seconds else "EXCEEDED"
    row = Row(
        f"sdk_terms: {num_terms} terms that wait for {seconds:g} s when {phase}, forward and backward included",
        "s",
        ours_s,
        peer_s,
        "forward_backward_custom with the waits in its loss",
    )
    return replace(row, note=f"budget {BUDGET_S * seconds:g} s: {verdict}")


def _ours(trainer: tinker.TrainingClient, data: Sequence[types.Datum], objective: Objective) -> None:
    forward_backward_regularized(trainer, data, objective).result()


def _peer(trainer: tinker.TrainingClient, data: Sequence[types.Datum], seconds: float, num_terms: int) -> None:
    def loss_fn(data: list[types.Datum], logprobs_D: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        for _ in range(num_terms):
            time.sleep(seconds)
        return -torch.cat(logprobs_D).sum(), {}

    trainer.forward_backward_custom(list(data), loss_fn).result()


def _seconds(function: Callable[[], object]) -> float:
    started = perf_counter()
    function()
    return perf_counter() - started
