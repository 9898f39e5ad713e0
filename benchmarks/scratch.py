"""Temporary project home, Prefect server, engine processes and data of the benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tinker
import torch
from prefect.settings import PREFECT_API_URL, temporary_settings
from tinker import types
from tinker_cookbook.tokenizer_utils import Tokenizer

import examples
from blocks.files.local import home
from blocks.servers.processes import local_prefect_server
from examples.gsm8k import read_problems
from flows.monitoring.drain import deliver_events

# The Tinker SDK accepts only keys that start with tml-.
KEY = "tml-bench"
GSM8K = Path(examples.__path__[0]) / "data" / "gsm8k_train.jsonl"


@contextmanager
def scratch_home() -> Iterator[Path]:
    """Use a temporary project home that shares only the model cache with the real home."""
    cache = home() / "cache"
    cache.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="tinker-flows-bench-", ignore_cleanup_errors=True) as folder:
        Path(folder, "cache").symlink_to(cache)
        with environment(TINKER_FLOWS_HOME=folder):
            yield Path(folder)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables until the block ends."""
    previous = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(previous)


@contextmanager
def scratch_prefect_server() -> Iterator[str]:
    """Run a Prefect server for the flows of the block; yields the URL of its API."""
    with local_prefect_server() as url, temporary_settings({PREFECT_API_URL: url}):
        try:
            yield url
        finally:
            # Prefect's thread for events would stay connected to this server and lose the events of later flows.
            deliver_events()


@contextmanager
def bench_engine(folder: Path, model: str, cycle_s: float | None = None, threads: int = 1) -> Iterator[str]:
    """Run an engine with the API key `KEY`; yields its URL.

    Args:
        cycle_s: seconds between the moments at which training requests start; None: they start at once.
    """
    command = [sys.executable, "-m", "engine", "--port", "0", "--exit-with-stdin", "--model", model]
    command += ["--threads", str(threads), "--state", str(folder / "engine")]
    command += ["--clock-cycle", str(cycle_s)] if cycle_s else []
    variables = {**os.environ, "TINKER_ENGINE_API_KEY": KEY}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdin is not None
        try:
            url = engine.stdout.readline().strip()
            if not url:
                raise RuntimeError("The engine exited before it printed its URL: see its output above.")
            yield url
        finally:
            engine.stdin.close()


def run_module(arguments: list[str], log: Path) -> float:
    """Run a module in a separate process to completion; return the seconds."""
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.run(
            [sys.executable, "-m", *arguments],
            stdout=output,
            stderr=output,
            cwd=Path(__file__).parent.parent,
            check=False,
        )
    if process.returncode:
        raise RuntimeError(f"{arguments[0]} exited with status {process.returncode}: {log.read_text()[-2000:]}")
    return time.monotonic() - started


def solutions(tokenizer: Tokenizer, num_datums: int, num_tokens: int) -> list[tinker.Datum]:
    """Return datums of exactly `num_tokens` tokens: concatenated GSM8K solutions, with loss on every token."""
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
