"""Cost of an objective relative to its update: three regularizers and their linearization.

Terms and linearization run between the forward pass and the update. `prepare` runs ahead, while the service computes
the previous step. The peer is `forward_backward` of the same batch on the smallest model, so the ratios are an upper
bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch
from tqdm import tqdm

from benchmarks.rows import Row
from benchmarks.scratch import scratch_home, solutions
from blocks.servers.processes import local_engine
from objectives.evaluate import evaluate_base, evaluate_term, prepare_features
from objectives.gradients.linearize import linearize
from objectives.objective import Objective
from tasks.training.datums import pack_datums
from tasks.training.forward_backward import enqueue_forward, read_outputs

REGULARIZERS = ("topology", "logic", "confidence")


def measure(*, repetitions: int = 7, num_datums: int = 64, num_tokens: int = 256) -> list[Row]:
    """Return a row for the work between two requests and one for the work ahead of a step."""
    objective = Objective(regularizers=[{"name": name, "weight": 0.1} for name in REGULARIZERS])
    figures: list[tuple[float, float, float]] = []
    with (
        scratch_home(),
        local_engine(model="tiny", dtype="float32", threads=1) as service,
        service.get_client() as session,
    ):
        client = session.create_lora_training_client("tiny", rank=8, seed=0).result()
        tokenizer = client.get_tokenizer()
        batch = pack_datums(solutions(tokenizer, num_datums, num_tokens), tokenizer)
        outputs = read_outputs(enqueue_forward(client, batch).result(), batch)

        def prepare() -> list[object]:
            return [prepare_features(term, batch) for term in objective.regularizers]

        features = prepare()

        def evaluate() -> torch.Tensor:
            evaluated = [
                (evaluate_term(term, outputs, replace(batch, features=term_features), first_step=False), 0.1)
                for term, term_features in zip(objective.regularizers, features, strict=True)
            ]
            return linearize(evaluate_base(objective.base, outputs, batch), evaluated).loss_weights_DT

        def forward_backward() -> object:
            return client.forward_backward(list(batch.datums), "cross_entropy").result()

        for _ in tqdm(range(repetitions), desc="objective_cost"):
            figures.append((_ms(evaluate), _ms(prepare), _ms(forward_backward)))
    between, ahead, update = (list(column) for column in zip(*figures, strict=True))
    size = f"{num_datums} x {num_tokens} tokens"
    peer_name = "forward_backward of the same batch, tiny model, 1 thread"
    names = ", ".join(REGULARIZERS)
    return [
        Row(
            f"objective_cost: evaluate and linearize, {size}",
            "ms",
            between,
            update,
            peer_name,
            f"{names}, sequentially",
        ),
        Row(f"objective_cost: prepare (runs ahead), {size}", "ms", ahead, update, peer_name, f"{names}, sequentially"),
    ]


def _ms(function: Callable[[], object]) -> float:
    started = perf_counter()
    function()
    return 1000 * (perf_counter() - started)
