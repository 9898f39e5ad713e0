"""Unlikelihood training: lower the probability of given tokens or of repeated n-grams."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.reductions import reduce, trained_tokens
from objectives.term import regularizer

# Above this number of token ids, one lookup is faster than one comparison per id.
_MAX_COMPARISONS = 32


@regularizer("unlikely_tokens", kind="scored", estimator="unlikelihood")
def unlikely_tokens(
    outputs: Outputs, batch: Batch, *, tokens: Annotated[tuple[int, ...], Field(min_length=1)]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Flag of each target, ``(N,)``: 1 if it is in ``tokens``, else 0; the loss is ``-log(1 - p)`` of the flagged.

    Source: Welleck et al. 2020, "Neural Text Generation With Unlikelihood Training" (arXiv:1908.04319), equation 3,
    with ``tokens`` as the negative candidates at every position. A service returns logprobs of targets only, so a
    candidate is penalized only at positions where it is the target.

    Args:
        tokens: token ids to make less likely.

    Metrics:
        flagged: flagged share of the trained tokens.

    >>> batch = Batch(torch.tensor([5, 6, 5]), torch.ones(3), torch.tensor([0, 3]))
    >>> unlikely_tokens(Outputs(torch.zeros(3)), batch, tokens=(5, 9))[0]
    tensor([1., 0., 1.])
    """
    flags_DT = _is_one_of(batch.target_tokens_DT, tokens).to(outputs.logprobs_DT.dtype)
    return flags_DT, {"flagged": reduce(flags_DT, batch, "token_mean")}


def _is_one_of(target_tokens_DT: Tensor, tokens: tuple[int, ...]) -> Tensor:
    if len(tokens) > _MAX_COMPARISONS:
        return torch.isin(target_tokens_DT, torch.tensor(tokens))
    # Compare with each id: torch.fx can trace a comparison with a number, but not one with a tensor of ids.
    flags_DT = target_tokens_DT == tokens[0]
    for token in tokens[1:]:
        flags_DT = flags_DT | (target_tokens_DT == token)
    return flags_DT


def find_repeats(batch: Batch, *, n: Annotated[int, Field(ge=1)] = 4) -> list[bool]:
    """Flag each trained token that completes an n-gram seen before among the trained tokens of its datum.

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
    """Flag of each target, ``(N,)``: 1 if it completes a repeated n-gram, else 0; the loss is its ``-log(1 - p)``.

    Source: the sequence-level candidates of Welleck et al. 2020 (arXiv:1908.04319), equation 7.

    Args:
        n: tokens per n-gram.

    Metrics:
        flagged: flagged share of the trained tokens.
    """
    flags_DT = torch.zeros_like(outputs.logprobs_DT, requires_grad=False)
    flags_DT[batch.mask_DT] = flags_DT.new_tensor(batch.features)
    return flags_DT, {"flagged": float(reduce(flags_DT, batch, "token_mean"))}
