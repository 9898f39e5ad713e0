"""A home that is gone after the benchmark, and the data that benchmarks run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tinker
import torch
from tinker import types
from tinker_cookbook.tokenizer_utils import Tokenizer

import examples
from blocks.home import home
from examples.gsm8k import read_problems

GSM8K = Path(examples.__path__[0]) / "data" / "gsm8k_train.jsonl"


@contextmanager
def scratch_home() -> Iterator[Path]:
    """Databases, checkpoints and logs go to a temporary home; models that were made before are found there."""
    cache = home() / "cache"
    cache.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="tinker-flows-bench-", ignore_cleanup_errors=True) as folder:
        Path(folder, "cache").symlink_to(cache)
        with environment(TINKER_FLOWS_HOME=folder):
            yield Path(folder)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """These environment variables, until the block ends."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def solutions(tokenizer: Tokenizer, num_datums: int, num_tokens: int) -> list[tinker.Datum]:
    """Datums of exactly `num_tokens` tokens each: GSM8K solutions end to end, every token trained on."""
    rows = cycle(read_problems(GSM8K))
    return [_datum(tokenizer, rows, num_tokens) for _ in range(num_datums)]


def _datum(tokenizer: Tokenizer, rows: Iterator[dict[str, Any]], num_tokens: int) -> tinker.Datum:
    tokens: list[int] = []
    while len(tokens) <= num_tokens:
        tokens += tokenizer.encode(next(rows)["answer"] + "\n", add_special_tokens=False)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:num_tokens]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor(tokens[1 : num_tokens + 1])),
            "weights": types.TensorData.from_torch(torch.ones(num_tokens)),
        },
    )
