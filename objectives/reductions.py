"""From one value per token or per datum to one number, over the tokens that are trained on."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from objectives.batch import Batch
from objectives.errors import ObjectiveError
from objectives.one_datum import OneDatum

Reduction = Literal["token_mean", "sequence_mean", "sum", "none"]


def sum_by_datum(values_DT: Tensor, batch: Batch) -> Tensor:
    """Sum of each datum's trained tokens: ``(N,) -> (D,)``.

    >>> batch = Batch(torch.zeros(3).long(), torch.tensor([0.0, 1, 1]), torch.tensor([0, 2, 3]))
    >>> sum_by_datum(torch.tensor([5.0, 6.0, 7.0]), batch)
    tensor([6., 7.])
    """
    if isinstance(batch, OneDatum):
        return batch.sum(values_DT)
    if values_DT.shape != (batch.num_tokens,):
        raise ObjectiveError(
            f"values of shape {tuple(values_DT.shape)} where one for each of {batch.num_tokens} tokens is expected; of "
            "a batch with K targets at each position, a term reads them all or sums over them"
        )
    trained_DT = torch.where(batch.mask_DT, values_DT, 0.0)
    return torch.segment_reduce(trained_DT, "sum", offsets=batch.offsets_D, axis=0)


def mean_by_datum(values_DT: Tensor, batch: Batch) -> Tensor:
    """Mean of each datum's trained tokens: ``(N,) -> (D,)``; 0 for a datum that has none."""
    counts_D = sum_by_datum(torch.ones_like(values_DT), batch)
    return sum_by_datum(values_DT, batch) / counts_D.clamp(min=1)


def trained_datums(batch: Batch) -> Tensor:
    """bool ``(D,)``: the datums that have a token to train on."""
    return sum_by_datum(torch.ones(batch.num_tokens), batch) > 0


def refuse_several_targets(batch: Batch) -> None:
    """Refuse a batch with K targets at each position, for a term that would mistake them for something else."""
    if batch.target_tokens_DT.ndim != 1:
        raise ObjectiveError("it reads one target at each position, and this batch has several: leave the term out")


def trained_tokens(batch: Batch) -> list[list[int]]:
    """The target tokens that each datum is trained on, as ``D`` lists."""
    refuse_several_targets(batch)
    lengths_D = sum_by_datum(torch.ones(batch.num_tokens), batch).long().tolist()
    return [each.tolist() for each in batch.target_tokens_DT[batch.mask_DT].split(lengths_D)]


def reduce(value: Tensor, batch: Batch, reduction: Reduction) -> Tensor:
    """Reduce a term's value to 0-d.

    Tokens of weight 0, and datums that have no other, take no part. A value per datum ``(D,)`` is averaged
    over the datums under either mean.

    Args:
        value: ``(N,)``, ``(D,)``, or 0-d with ``"none"``.
        reduction: ``"token_mean"``: mean over all tokens, a long datum counts more;
            ``"sequence_mean"``: mean over datums of each one's mean, all datums count the same;
            ``"sum"``: neither length nor batch size is divided out; ``"none"``: the value is reduced already.

    Raises:
        ObjectiveError: for a value of any other shape.
    """
    if isinstance(batch, OneDatum):
        return value.sum()  # not a term's value but one of its metrics, which are computed from the answer
    if reduction == "none" and value.ndim == 0:
        return value
    if reduction == "none" or value.shape not in ((batch.num_tokens,), (batch.num_datums,)):
        raise ObjectiveError(
            f"a value of shape {tuple(value.shape)} under the reduction {reduction!r}, where "
            f"({batch.num_tokens},) per token, ({batch.num_datums},) per datum, or 0-d with the reduction "
            "'none' is expected; declare the reduction that fits"
        )
    per_token = value.shape == (batch.num_tokens,)
    if per_token and reduction == "sequence_mean":
        value, per_token = mean_by_datum(value, batch), False
    mask = batch.mask_DT if per_token else trained_datums(batch)
    total = torch.where(mask, value, 0.0).sum()
    return total if reduction == "sum" else total / mask.sum()
