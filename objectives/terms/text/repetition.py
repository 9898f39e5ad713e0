"""Penalty on repeated n-grams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.reductions import trained_tokens
from objectives.term import regularizer

NGram = Annotated[int, Field(ge=1)]


def repeated_shares(batch: Batch, *, n: NGram = 4) -> list[float]:
    """Compute `repeated_share` of each datum's trained tokens."""
    return [repeated_share(tokens, n) for tokens in trained_tokens(batch)]


def repeated_share(tokens: Sequence[int], n: int) -> float:
    """Share of n-grams that occurred earlier in the same sequence; 0 for a sequence shorter than n.

    >>> repeated_share([1, 2, 1, 2, 1], n=2)
    0.5
    """
    ngrams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


@regularizer("repetition", kind="scored", prepare=repeated_shares)
def repetition(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Share of repeated n-grams, ``1 - distinct n-grams / n-grams``, per datum ``(D,)``, over its trained tokens.

    Source: seq-rep-n of Welleck et al. 2020, "Neural Text Generation With Unlikelihood Training"
    (arXiv:1908.04319), section 6. See `unlikely_repeats` to penalize the repeated tokens directly.

    Args:
        n: tokens per n-gram.

    Metrics:
        repeated_mean, repeated_max: over the datums.
    """
    shares: list[float] = batch.features
    return outputs.logprobs_DT.new_tensor(shares), {
        "repeated_mean": sum(shares) / len(shares),
        "repeated_max": max(shares),
    }
