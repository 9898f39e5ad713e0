"""Penalty on extreme logprobs."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.reductions import reduce
from objectives.term import regularizer


@regularizer("magnitude")
def magnitude(
    outputs: Outputs, batch: Batch, *, limit: Annotated[float, Field(ge=0, lt=10)] = 5.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared hinge, ``max(0, |log p| - limit)^2`` of each target token, nats squared, ``(N,)``; minimizes the mean.

    Logprobs within the limit cost nothing. Beyond it, the gradient grows linearly with the excess. With ``limit=0`` the
    term equals `l2`.

    Source: the squared hinge of Cortes & Vapnik 1995, "Support-Vector Networks", applied to logprobs.

    Args:
        limit: nats; 5 is a probability of 0.7 %.

    Metrics:
        beyond: share of trained tokens beyond the limit; size_max: maximum ``|log p|`` of the trained tokens.

    >>> batch = Batch(torch.tensor([5, 6]), torch.ones(2), torch.tensor([0, 2]))
    >>> magnitude(Outputs(torch.tensor([-1.0, -7.0])), batch)
    (tensor([0., 4.]), {'beyond': tensor(0.5000), 'size_max': tensor(7.)})
    """
    sizes_DT = outputs.logprobs_DT.abs()
    excess_DT = (sizes_DT - limit).clamp(min=0)
    beyond_DT = (excess_DT.detach() > 0).to(sizes_DT.dtype)
    return excess_DT**2, {
        "beyond": reduce(beyond_DT, batch, "token_mean"),
        "size_max": torch.where(batch.mask_DT, sizes_DT.detach(), 0.0).max(),
    }
