"""Internals of tinker-cookbook that the project uses. Only this module imports them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from tinker_cookbook.eval.benchmarks import REGISTRY, BenchmarkBuilder
from tinker_cookbook.eval.benchmarks._runner import _ensure_registered
from tinker_cookbook.eval.benchmarks._types import METRIC_CONTEXT_OVERFLOW, METRIC_MAX_TOKENS_REACHED

_LOADER = "load_benchmark_dataset"
_LOADING = Lock()


def find_benchmark(name: str) -> BenchmarkBuilder | None:
    """Import a benchmark by its name; return None if there is none of this name."""
    _ensure_registered(name)
    return REGISTRY.get(name)


def was_truncated(metrics: dict[str, float | int]) -> bool:
    """Return whether the metrics of an answer to a benchmark say that it reached a limit of tokens."""
    return bool(metrics.get(METRIC_MAX_TOKENS_REACHED) or metrics.get(METRIC_CONTEXT_OVERFLOW))


@contextmanager
def local_datasets(builder: BenchmarkBuilder, directory: Path) -> Iterator[None]:
    """Let a benchmark load its dataset from a local directory in this block, which other threads wait for.

    A benchmark calls a function of its module with the name of a dataset of the hub. There is no parameter for it.
    """
    module = sys.modules[type(builder).__module__]
    load = getattr(module, _LOADER)

    def load_local(path: str, *args: Any, **kwargs: Any) -> Any:
        return load(str(directory), *args, **kwargs)

    with _LOADING:
        setattr(module, _LOADER, load_local)
        try:
            yield
        finally:
            setattr(module, _LOADER, load)
