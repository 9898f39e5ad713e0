"""Tensors of a term's own, so that whatever it does to them, no other term and no part of the run sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs

R = TypeVar("R", Batch, Outputs)


def own_copy(record: R) -> R:
    """The same with tensors of its own; texts are immutable, features and datums stay what they are."""
    copies = {}
    for field in fields(record):
        match getattr(record, field.name):
            case Tensor() as tensor:
                copies[field.name] = tensor.detach().clone()
            case Mapping() as tensors if field.name != "features":
                copies[field.name] = {key: tensor.clone() for key, tensor in tensors.items()}
    return replace(record, **copies)


def changed(record: R, copy: R) -> list[str]:
    """The names of the tensors in which a copy is not, to the bit, what it was made of.

    >>> record = Outputs(torch.tensor([float("nan"), 1.0]))
    >>> copy = own_copy(record)
    >>> changed(record, copy), copy.logprobs_DT.mul_(2)[1].item(), changed(record, copy)
    ([], 2.0, ['logprobs_DT'])
    """
    return [name for name, before, after in _pairs(record, copy) if not _same(before, after)]


def _pairs(record: R, copy: R) -> Iterator[tuple[str, Tensor, Tensor]]:
    for field in fields(record):
        before, after = getattr(record, field.name), getattr(copy, field.name)
        if isinstance(before, Tensor):
            yield field.name, before.detach(), after.detach()
        elif isinstance(before, Mapping) and field.name != "features":
            yield from ((f"{field.name}[{key!r}]", tensor, after[key]) for key, tensor in before.items())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _same(before: Tensor, after: Tensor) -> bool:
    return before.shape == after.shape and torch.equal(_bits(before), _bits(after))
