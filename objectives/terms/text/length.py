"""Soft penalty on long completions."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.reductions import sum_by_datum
from objectives.term import regularizer


def count_tokens(outputs: Outputs, batch: Batch) -> Tensor:
    """Number of trained tokens of each datum, ``(D,)``."""
    return sum_by_datum(torch.ones_like(outputs.logprobs_DT.detach()), batch)


@regularizer("length", kind="scored", metric_values={"tokens_mean": count_tokens})
def length(
    outputs: Outputs,
    batch: Batch,
    *,
    free: Annotated[int, Field(ge=0)] = 256,
    buffer: Annotated[int, Field(ge=1)] = 128,
) -> tuple[Tensor, dict[str, float]]:
    """Length penalty ``(T - free) / buffer``, clamped to [0, 1], per datum ``(D,)``; T is its number of trained tokens.

    Source: the soft overlong punishment of Yu et al. 2025, "DAPO" (arXiv:2503.14476), equation 13, as a cost.

    Args:
        free: number of tokens without a cost.
        buffer: number of further tokens over which the cost grows to 1.

    Metrics:
        tokens_mean, tokens_max: over the datums; over: share of datums with a cost above 0. A target can constrain
        tokens_mean.

    >>> batch = Batch(torch.zeros(6).long(), torch.ones(6), torch.tensor([0, 2, 6]))
    >>> length(Outputs(torch.zeros(6)), batch, free=2, buffer=4)
    (tensor([0.0000, 0.5000]), {'tokens_mean': 3.0, 'tokens_max': 4.0, 'over': 0.5})
    """
    lengths_D = count_tokens(outputs, batch)
    scores_D = ((lengths_D - free) / buffer).clamp(0, 1)
    return scores_D, {
        "tokens_mean": float(lengths_D.mean()),
        "tokens_max": float(lengths_D.max()),
        "over": float((scores_D > 0).to(torch.float64).mean()),
    }
