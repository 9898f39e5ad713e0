"""Reductions of values per token or per datum to one number, over the trained tokens."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from objectives.batch import Batch
from objectives.config.aliases import renamed_attribute
from objectives.errors import ObjectiveError
from objectives.proxies import OneDatum

Reduction = Literal["token_mean", "sequence_mean", "sum", "none"]

__getattr__ = partial(renamed_attribute, __name__)  # names of release 0.1


def sum_by_datum(values_DT: Tensor, batch: Batch) -> Tensor:
    """Sum of each datum's trained tokens: ``(N,) -> (D,)``.

    Raises:
        ObjectiveError: the values have another shape.

    >>> batch = Batch(torch.zeros(3).long(), torch.tensor([0.0, 1, 1]), torch.tensor([0, 2, 3]))
    >>> sum_by_datum(torch.tensor([5.0, 6.0, 7.0]), batch)
    tensor([6., 7.])
    """
    if isinstance(batch, OneDatum):
        return batch.sum(values_DT)
    if values_DT.shape == batch.target_tokens_DT.shape:
        check_single_target(batch)
    if values_DT.shape != (batch.num_tokens,):
        raise ObjectiveError(
            f"values have the shape {tuple(values_DT.shape)}, but the batch has {batch.num_tokens} tokens; return one "
            "value per token"
        )
    trained_DT = torch.where(batch.mask_DT, values_DT, 0.0)
    return torch.segment_reduce(trained_DT, "sum", offsets=batch.offsets_D, axis=0)


def prefix_sum_by_datum(values_DT: Tensor, batch: Batch) -> Tensor:
    """Sum of each datum's trained tokens up to and including each token: ``(N,) -> (N,)``.

    Raises:
        ObjectiveError: the batch has K targets per position.

    >>> batch = Batch(torch.zeros(4).long(), torch.tensor([0.0, 1, 1, 1]), torch.tensor([0, 3, 4]))
    >>> prefix_sum_by_datum(torch.tensor([5.0, 6.0, 7.0, 8.0]), batch)
    tensor([ 0.,  6., 13.,  8.])
    """
    if isinstance(batch, OneDatum):
        return batch.prefix_sum(values_DT)
    check_single_target(batch)
    # In float64, because the sum over all datums is subtracted again.
    sums_DT = torch.where(batch.mask_DT, values_DT, 0.0).double().cumsum(0)
    before_D = torch.cat([sums_DT.new_zeros(1), sums_DT])[batch.offsets_D[:-1]]
    return (sums_DT - before_D.repeat_interleave(batch.offsets_D.diff())).to(values_DT.dtype)


def mean_by_datum(values_DT: Tensor, batch: Batch) -> Tensor:
    """Mean of each datum's trained tokens: ``(N,) -> (D,)``; 0 for a datum without trained tokens.

    Raises:
        ObjectiveError: the values have another shape.
    """
    counts_D = sum_by_datum(torch.ones_like(values_DT), batch)
    return sum_by_datum(values_DT, batch) / counts_D.clamp(min=1)


def trained_datums(batch: Batch) -> Tensor:
    """Mask of the datums with at least one trained token, bool ``(D,)``."""
    return sum_by_datum(torch.ones(batch.num_tokens), batch) > 0


def check_single_target(batch: Batch) -> None:
    """Check that the batch has one target per position.

    Raises:
        ObjectiveError: the batch has K targets per position.
    """
    if batch.target_tokens_DT.ndim != 1:
        raise ObjectiveError(
            f"the batch has {batch.target_tokens_DT.shape[1]} targets per position, but this term reads one; disable "
            "it, or, in a term of your own, sum over the targets"
        )


def trained_tokens(batch: Batch) -> list[list[int]]:
    """Return the trained target tokens of each datum, as ``D`` lists.

    Raises:
        ObjectiveError: the batch has K targets per position.
    """
    check_single_target(batch)
    lengths_D = sum_by_datum(torch.ones(batch.num_tokens), batch).long().tolist()
    return [tokens.tolist() for tokens in batch.target_tokens_DT[batch.mask_DT].split(lengths_D)]


def _fix_of_shape(value: Tensor, batch: Batch, reduction: Reduction) -> str:
    """Advice on a value that does not fit its reduction: another reduction if one fits, otherwise another shape."""
    if value.ndim == 0:
        return "declare the reduction 'none'"
    if value.shape in ((batch.num_tokens,), (batch.num_datums,)):
        return "declare the reduction 'token_mean', 'sequence_mean' or 'sum'"
    expected = f"({batch.num_tokens},) per token or ({batch.num_datums},) per datum"
    return "return a 0-d value" if reduction == "none" else f"return {expected}"


def reduce(value: Tensor, batch: Batch, reduction: Reduction) -> Tensor:
    """Reduce a term's value to 0-d.

    Tokens of weight 0 are ignored, and so are datums that have no trained token. For a value per datum, ``(D,)``, both
    means are the mean over the datums.

    Args:
        value: ``(N,)``, ``(D,)``, or 0-d with ``"none"``.
        reduction: ``"token_mean"``: mean over all tokens, so long datums count more;
            ``"sequence_mean"``: mean over datums of the mean of each datum, so all datums count the same;
            ``"sum"``: no normalization; ``"none"``: the value is already 0-d.

    Raises:
        ObjectiveError: the value has another shape.
    """
    if isinstance(batch, OneDatum):
        # While a term is traced, only its metrics call this, and they are computed again: any 0-d value does.
        return value.sum()
    if reduction == "none" and value.ndim == 0:
        return value
    if value.shape == batch.target_tokens_DT.shape:
        check_single_target(batch)
    if reduction == "none" or value.shape not in ((batch.num_tokens,), (batch.num_datums,)):
        raise ObjectiveError(
            f"the value has the shape {tuple(value.shape)} with the reduction {reduction!r}; "
            f"{_fix_of_shape(value, batch, reduction)}"
        )
    per_token = value.shape == (batch.num_tokens,)
    if per_token and reduction == "sequence_mean":
        value, per_token = mean_by_datum(value, batch), False
    mask = batch.mask_DT if per_token else trained_datums(batch)
    total = torch.where(mask, value, 0.0).sum()
    return total if reduction == "sum" else total / mask.sum()
