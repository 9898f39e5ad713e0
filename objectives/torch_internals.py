"""Internals of torch that this package uses; no other module of the package reads a private name of a library."""

from __future__ import annotations

from torch import Tensor


def count_changes(tensor: Tensor) -> int:
    """Return the number of in-place operations on a tensor and its views since it was created.

    >>> import torch
    >>> tensor = torch.zeros(2)
    >>> tensor[:1].add_(1.0), count_changes(tensor)
    (tensor([1.]), 1)
    """
    return tensor._version
