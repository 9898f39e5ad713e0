"""K targets at each position as a whole distribution: all other tokens count as one more."""

from __future__ import annotations

import torch
from torch import Tensor

# What is left to all other tokens at least, so that its logarithm is finite.
_LEAST_REST = 1e-6


def with_rest(logprobs_DTK: Tensor) -> Tensor:
    """``(N, K) -> (N, K + 1)``, nats: the log-probability of all other tokens together comes last.

    To put symbols together can only lower an entropy or a divergence, so what is computed from these K + 1 is a lower
    bound of the same over the vocabulary, and near it where the K targets hold most of the probability.

    Args:
        logprobs_DTK: of K different tokens at each position.

    >>> with_rest(torch.tensor([[0.5, 0.3]]).log()).exp()
    tensor([[0.5000, 0.3000, 0.2000]])
    """
    rest_DT = (1 - logprobs_DTK.exp().sum(-1, keepdim=True)).clamp(min=_LEAST_REST)
    return torch.cat([logprobs_DTK, rest_DT.log()], -1)
