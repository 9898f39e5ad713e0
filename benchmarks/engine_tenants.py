"""Eight training clients that take turns on one engine, against one client with the same number of steps.

The clients share the weights of the base model; each adds only its adapter and optimizer state to the engine's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import psutil
import tinker
import torch
from tinker import types
from tqdm import tqdm
from transformers import AutoTokenizer

from benchmarks.rows import Row
from benchmarks.scratch import scratch_home, solutions
from blocks.files.local import home
from blocks.servers.processes import local_engine
from engine.models import resolve_model

NUM_CLIENTS, RANK = 8, 8
NUM_DATUMS, NUM_TOKENS = 1, 64
ADAM = types.AdamParams(learning_rate=1e-4)


def measure(*, model: str = "smollm2-135m", repetitions: int = 3) -> list[Row]:
    """Return one row: tokens per second of all clients together, with the memory per client in its note."""
    with scratch_home():
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(model, home() / "cache"))
        batch = solutions(tokenizer, NUM_DATUMS, NUM_TOKENS)
        before = psutil.Process().children()
        threads = torch.get_num_threads()
        with local_engine(model=model, dtype="float32", threads=threads) as service, service.get_client() as session:
            (engine,) = (child for child in psutil.Process().children() if child not in before)

            def open_client(seed: int) -> tinker.TrainingClient:
                """Open a client whose adapter and optimizer state have been allocated by a step."""
                client = session.create_lora_training_client(model, rank=RANK, seed=seed).result()
                _tokens_per_s([client], batch)
                return client

            one = open_client(0)
            _tokens_per_s([one], batch)
            alone_bytes = engine.memory_info().rss
            others = [open_client(seed) for seed in range(1, NUM_CLIENTS)]
            client_bytes = (engine.memory_info().rss - alone_bytes) / len(others)
            ours, peer = [], []
            for _ in tqdm(range(repetitions), desc="engine_tenants"):
                ours.append(_tokens_per_s([one, *others], batch))
                peer.append(_tokens_per_s([one] * NUM_CLIENTS, batch))
    return [
        Row(
            f"engine_tenants: {NUM_CLIENTS} clients taking turns, {NUM_DATUMS} x {NUM_TOKENS} tokens each, {model}",
            "tokens/s",
            ours,
            peer,
            peer_name="one client, the same number of steps",
            note=f"each client takes {client_bytes / 2**20:.0f} MiB of the engine's memory at rank {RANK}",
        )
    ]


def _tokens_per_s(clients: Sequence[tinker.TrainingClient], batch: list[tinker.Datum]) -> float:
    started = perf_counter()
    for client in clients:
        output, updated = client.forward_backward(batch, "cross_entropy"), client.optim_step(ADAM)
        output.result()
        updated.result()
    return len(clients) * NUM_DATUMS * NUM_TOKENS / (perf_counter() - started)
