"""Unlikelihood: certain targets should become less likely, whatever else their datum teaches."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.reductions import reduce, trained_tokens
from objectives.term import regularizer

# Of token ids, from which a look-up is quicker than comparing with one after another.
_MANY = 32


@regularizer("unlikely_tokens", kind="scored", estimator="unlikelihood")
def unlikely_tokens(
    outputs: Outputs, batch: Batch, *, tokens: Annotated[tuple[int, ...], Field(min_length=1)]
) -> tuple[Tensor, dict[str, Tensor]]:
    """1 for each target that is one of the given tokens, ``(N,)``; its ``-log(1 - p)`` is minimised.

    Source: Welleck et al. 2020, "Neural Text Generation With Unlikelihood Training" (arXiv:1908.04319), equation 3,
    with the same candidates everywhere; a service returns logprobs of targets only, so they train where they are one.

    Args:
        tokens: their ids.

    Metrics:
        flagged: the share of trained tokens.

    >>> batch = Batch(torch.tensor([5, 6, 5]), torch.ones(3), torch.tensor([0, 3]))
    >>> unlikely_tokens(Outputs(torch.zeros(3)), batch, tokens=(5, 9))[0]
    tensor([1., 0., 1.])
    """
    flags_DT = _is_one_of(batch.target_tokens_DT, tokens).to(outputs.logprobs_DT.dtype)
    return flags_DT, {"flagged": reduce(flags_DT, batch, "token_mean")}


def _is_one_of(target_tokens_DT: Tensor, tokens: tuple[int, ...]) -> Tensor:
    if len(tokens) > _MANY:
        return torch.isin(target_tokens_DT, torch.tensor(tokens))
    # A few comparisons can be traced, and a tensor of ids cannot.
    flags_DT = target_tokens_DT == tokens[0]
    for token in tokens[1:]:
        flags_DT = flags_DT | (target_tokens_DT == token)
    return flags_DT


def find_repeats(batch: Batch, *, n: Annotated[int, Field(ge=1)] = 4) -> list[bool]:
    """Of each trained token, whether with the ``n - 1`` before it it makes an n-gram that its datum had already.

    >>> find_repeats(Batch(torch.tensor([1, 2, 1, 2, 1]), torch.ones(5), torch.tensor([0, 5])), n=2)
    [False, False, False, True, True]
    """
    flags: list[bool] = []
    for tokens in trained_tokens(batch):
        seen: set[tuple[int, ...]] = set()
        for end in range(1, len(tokens) + 1):
            ngram = tuple(tokens[max(0, end - n) : end])
            flags.append(len(ngram) == n and ngram in seen)
            seen.add(ngram)
    return flags


@regularizer("unlikely_repeats", kind="scored", prepare=find_repeats, estimator="unlikelihood")
def unlikely_repeats(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """1 for each target that completes an n-gram of its own datum again, ``(N,)``; its ``-log(1 - p)`` is minimised.

    Source: the sequence-level candidates of Welleck et al. 2020 (arXiv:1908.04319), equation 7.

    Args:
        n: tokens in an n-gram.

    Metrics:
        flagged: the share of trained tokens.
    """
    flags_DT = torch.zeros_like(outputs.logprobs_DT, requires_grad=False)
    flags_DT[batch.mask_DT] = flags_DT.new_tensor(batch.features)
    return flags_DT, {"flagged": float(reduce(flags_DT, batch, "token_mean"))}
