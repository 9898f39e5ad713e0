"""Cost of the digests that a checkpoint records: of each batch, and of code, tokenizer and files once per start.

The peer is `forward_backward` of the same batch on the smallest model, so the ratios are an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from tqdm import tqdm

from benchmarks.rows import Row
from benchmarks.scratch import scratch_home, solutions
from blocks.servers.processes import local_engine
from examples.gsm8k import Gsm8kBuilder
from flows.runs.start.contents import Contents
from tasks.common.digests import digest_code, digest_file, digest_tokenizer
from tasks.training.datums import pack_datums

BUDGET = 0.01
_FILE_BYTES = 100_000_000


def measure(*, repetitions: int = 7, num_datums: int = 64, num_tokens: int = 256) -> list[Row]:
    """Return a row for the digests of a step and one for those of a start."""
    contents = Contents({})
    figures: list[tuple[float, float, float]] = []
    with (
        scratch_home(),
        TemporaryDirectory() as folder,
        local_engine(model="tiny", dtype="float32", threads=1) as service,
        service.get_client() as session,
    ):
        client = session.create_lora_training_client("tiny", rank=8, seed=0).result()
        tokenizer = client.get_tokenizer()
        batch = pack_datums(solutions(tokenizer, num_datums, num_tokens), tokenizer)
        file = Path(folder) / "data.jsonl"
        file.write_bytes(bytes(_FILE_BYTES))

        def start() -> list[object]:
            return [digest_tokenizer(tokenizer), digest_code(Gsm8kBuilder), digest_file(file)]

        def forward_backward() -> object:
            return client.forward_backward(list(batch.datums), "cross_entropy").result()

        forward_backward()
        for _ in tqdm(range(repetitions), desc="digest_cost"):
            step_ms = _ms(lambda: contents.add(0, [batch], sampled=False))
            figures.append((step_ms, _ms(start), _ms(forward_backward)))
    of_step, of_start, update = (list(column) for column in zip(*figures, strict=True))
    share = sorted(ours / peer for ours, peer in zip(of_step, update, strict=True))[repetitions // 2]
    verdict = "holds" if share <= BUDGET else "EXCEEDED"
    peer_name = "forward_backward of the same batch, tiny model, 1 thread"
    return [
        Row(
            f"digest_cost: digest of a step's batch, {num_datums} x {num_tokens} tokens",
            "ms",
            of_step,
            update,
            peer_name,
            f"{share:.2%} of a step (budget {BUDGET:.0%}: {verdict})",
        ),
        Row(
            "digest_cost: tokenizer, builder and a file of 100 MB, once per start",
            "ms",
            of_start,
            update,
            peer_name,
        ),
    ]


def _ms(function: Callable[[], object]) -> float:
    started = perf_counter()
    function()
    return 1000 * (perf_counter() - started)
