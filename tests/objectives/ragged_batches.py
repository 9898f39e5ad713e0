"""Ragged batches with float64 logprobs, and GSM8K solutions for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
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
    """Make a batch with random weights and random logprobs from -5.001 to -0.001; ``masks`` is False for prompts."""
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
    """Ragged batches, including datums without tokens and datums without trained tokens."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
    masks = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)).filter(any))
    return make_batch(lengths, seed=draw(st.integers(0, 2**16)), masks=masks)


def with_policies(batch: Batch, outputs: Outputs, *, seed: int = 1) -> tuple[Batch, Outputs]:
    """Add random target tokens from a small vocabulary, reference logprobs and sampling logprobs."""
    generator = torch.Generator().manual_seed(seed)
    target_tokens_DT = torch.randint(0, 5, (batch.num_tokens,), generator=generator)
    near = [
        outputs.logprobs_DT.clamp(max=-0.5)
        + torch.rand(batch.num_tokens, generator=generator, dtype=torch.float64)
        - 0.5
        for _ in range(2)
    ]
    return replace(batch, target_tokens_DT=target_tokens_DT), replace(
        outputs, ref_logprobs_DT=near[0], sampling_logprobs_DT=near[1]
    )


def several(batch: Batch, outputs: Outputs, *, num_targets: int, seed: int = 2) -> tuple[Batch, Outputs]:
    """Replace the targets by K targets per position, with probabilities that sum to less than 1."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch.num_tokens, num_targets + 1)
    logits = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    logprobs, ref_logprobs, sampling_logprobs = (logits_.log_softmax(-1)[:, :-1] for logits_ in logits)
    targets = torch.arange(num_targets).expand(batch.num_tokens, num_targets)
    weights = batch.weights_DT[:, None] * logprobs.exp().float()
    return replace(batch, target_tokens_DT=targets, weights_DT=weights), Outputs(
        logprobs, ref_logprobs, sampling_logprobs
    )


def datums(values_DT: Tensor, batch: Batch) -> list[list[float]]:
    """Return the values of the trained tokens of each datum as lists, for reference implementations."""
    bounds = batch.offsets_D.tolist()
    trained = batch.mask_DT.tolist()
    return [[float(values_DT[i]) for i in range(start, end) if trained[i]] for start, end in pairwise(bounds)]
