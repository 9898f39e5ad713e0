"""Internals of tinker-cookbook that the project uses. Only this module imports them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import tinker_cookbook.tokenizer_utils as tokenizer_utils
from tinker_cookbook.eval.benchmarks import REGISTRY, BenchmarkBuilder
from tinker_cookbook.eval.benchmarks._runner import _ensure_registered
from tinker_cookbook.eval.benchmarks._types import METRIC_CONTEXT_OVERFLOW, METRIC_MAX_TOKENS_REACHED
from tinker_cookbook.supervised.common import _counted_byte_count, _is_special_token, _special_token_ids
from tinker_cookbook.tokenizer_utils import Tokenizer, _get_hf_tokenizer

from objectives.config.import_policy import NotAllowedError, is_restricted

_LOADER = "load_benchmark_dataset"
_LOADING = Lock()


@cache
def guard_tokenizers() -> None:
    """Replace tinker-cookbook's loader of tokenizers: in a deployment's run, it runs no code of a local folder."""
    tokenizer_utils._get_hf_tokenizer = _guarded_tokenizer  # pyright: ignore[reportAttributeAccessIssue]


def _guarded_tokenizer(model_name: str) -> Tokenizer:
    folder = model_name.split(":")[0]
    if is_restricted() and Path(folder).is_dir():
        return _tokenizer_without_code(folder)
    return _get_hf_tokenizer(model_name)


@cache
def _tokenizer_without_code(folder: str) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise NotAllowedError(
            f"The tokenizer in {folder!r} needs the code in its folder, which a run of a deployment may not run: name "
            "another tokenizer, or start the run from a terminal."
        ) from error


def find_benchmark(name: str) -> BenchmarkBuilder | None:
    """Import a benchmark by name; return None if tinker-cookbook does not have it."""
    _ensure_registered(name)
    return REGISTRY.get(name)


def was_truncated(metrics: dict[str, float | int]) -> bool:
    """Return whether the metrics of an answer to a benchmark say that it reached a limit of tokens."""
    return bool(metrics.get(METRIC_MAX_TOKENS_REACHED) or metrics.get(METRIC_CONTEXT_OVERFLOW))


def text_token_mask(tokens: Sequence[int], tokenizer: Tokenizer) -> list[bool]:
    """Return which tokens `compute_bpb` counts: all but special ones."""
    special = _special_token_ids(tokenizer)
    return [not _is_special_token(token, tokenizer, special) for token in tokens]


def count_bytes(tokens: Sequence[int], counted: Sequence[bool], tokenizer: Tokenizer) -> int:
    """Return the number of UTF-8 bytes of the counted tokens, as `compute_bpb` counts them."""
    return _counted_byte_count([*tokens], [*counted], tokenizer)


@contextmanager
def local_datasets(builder: BenchmarkBuilder, directory: Path) -> Iterator[None]:
    """Let a benchmark load its dataset from a local directory inside this block. A lock admits one thread at a time.

    A benchmark calls `load_benchmark_dataset` with a name on the hub and has no parameter for a directory, so the block
    replaces the function in the module of the benchmark.
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
