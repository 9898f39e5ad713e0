"""Tensors of a term's own, so that whatever it does to them, no other term and no part of the run sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import fields
from typing import TypeVar

from torch import Tensor

from objectives.batch import Batch, Outputs

R = TypeVar("R", Batch, Outputs)


def own_copy(record: R) -> R:
    """The same with tensors of its own; texts are immutable, features and datums stay what they are."""
    copied = copy(record)  # not `replace`, which would check a batch again
    for field in fields(record):
        match getattr(record, field.name):
            case Tensor() as tensor:
                object.__setattr__(copied, field.name, tensor.detach().clone())
            case Mapping() as tensors if field.name != "features":
                object.__setattr__(copied, field.name, {key: tensor.clone() for key, tensor in tensors.items()})
    return copied


def changed(copied: Batch | Outputs) -> list[str]:
    """The names of the tensors that some operation of torch has changed in place since `own_copy` made them.

    >>> import torch
    >>> mine = own_copy(Outputs(torch.tensor([1.0, 2.0])))
    >>> changed(mine), mine.logprobs_DT[:1].zero_(), changed(mine)
    ([], tensor([0.]), ['logprobs_DT'])
    """
    return [name for name, tensor in _tensors(copied) if tensor._version > 0]


def _tensors(record: Batch | Outputs) -> Iterator[tuple[str, Tensor]]:
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            yield field.name, value
        elif isinstance(value, Mapping) and field.name != "features":
            yield from ((f"{field.name}[{key!r}]", tensor) for key, tensor in value.items())
