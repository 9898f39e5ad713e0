"""Repetition penalty: answers that say the same words again and again cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.reductions import trained_tokens
from objectives.term import regularizer

# Of tokens that are repeated: words, not the single letters or spaces that every text repeats.
NGram = Annotated[int, Field(ge=1)]


def repeated_shares(batch: Batch, *, n: NGram = 4) -> list[float]:
    """`repeated_share` of each datum's trained tokens."""
    return [repeated_share(tokens, n) for tokens in trained_tokens(batch)]


def repeated_share(tokens: Sequence[int], n: int) -> float:
    """The share of n-grams that occurred before in the same sequence; 0 for one shorter than n.

    >>> repeated_share([1, 2, 1, 2, 1], n=2)
    0.5
    """
    ngrams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


@regularizer("repetition", kind="scored", prepare=repeated_shares)
def repetition(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """``1 - distinct n-grams / n-grams`` of the trained tokens, per datum ``(D,)``, in [0, 1).

    Source: seq-rep-n of Welleck et al. 2020, "Neural Text Generation With Unlikelihood Training"
    (arXiv:1908.04319), section 6. To weigh the repeated tokens themselves, see `unlikely_repeats`.

    Args:
        n: tokens in an n-gram.

    Metrics:
        repeated_mean, repeated_max: over the datums.
    """
    shares: list[float] = batch.features
    return outputs.logprobs_DT.new_tensor(shares), {
        "repeated_mean": sum(shares) / len(shares),
        "repeated_max": max(shares),
    }
