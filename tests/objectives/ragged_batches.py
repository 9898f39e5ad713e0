"""Ragged float64 batches, and real solutions, for the tests of this room."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from hypothesis import strategies as st
from torch import Tensor

from objectives.batch import Batch, Outputs, pack

_PROBLEMS = Path(__file__).parents[2] / "examples" / "data" / "gsm8k_train.jsonl"

SOLUTIONS = tuple(json.loads(line)["answer"] for line in _PROBLEMS.read_text().splitlines())


def make_batch(
    lengths: Sequence[int], *, seed: int = 0, masks: Sequence[bool] | None = None, texts: Sequence[str] = ()
) -> tuple[Batch, Outputs]:
    """A batch of these lengths with random logprobs in (-5, 0) and random weights; False in masks is prompt."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    weights_DT = torch.rand(num_tokens, generator=generator) + 0.1
    if masks is not None:
        weights_DT *= torch.tensor(masks)
    offsets_D = pack([torch.empty(length) for length in lengths])[1]
    texts_D = tuple(texts) or ("",) * len(lengths)
    logprobs_DT = -5 * torch.rand(num_tokens, generator=generator, dtype=torch.float64) - 1e-3
    return Batch(torch.zeros(num_tokens, dtype=torch.int64), weights_DT, offsets_D, texts_D), Outputs(logprobs_DT)


@st.composite
def ragged(draw: st.DrawFn) -> tuple[Batch, Outputs]:
    """Any lengths, datums without a token and datums without a trained one among them."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
    masks = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)).filter(any))
    return make_batch(lengths, seed=draw(st.integers(0, 2**16)), masks=masks)


def datums(values_DT: Tensor, batch: Batch) -> list[list[float]]:
    """The trained tokens of each datum, as plain lists: what the slow twins loop over."""
    bounds = batch.offsets_D.tolist()
    trained = batch.mask_DT.tolist()
    return [[float(values_DT[i]) for i in range(start, end) if trained[i]] for start, end in pairwise(bounds)]
