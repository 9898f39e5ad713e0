"""Memory limits of a graph's values, checked before and after each operation."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from engine.custom_loss.operations import GROWING, SPLITTING, Operation
from engine.torch_internals import TorchDispatchMode

MAX_ELEMENTS = 2**24  # elements of one tensor, enough for all pairs of 4,096 tokens
MAX_TOTAL = 2**28  # elements of all tensors of one datum; the gradient needs them until the end
MAX_PIECES = 2**16  # results of one split
MAX_DIMS = 8


class TooLargeError(ValueError):
    """Value beyond the limits; the message is a clause."""


class SizeLimits:
    """Limits on the memory of one datum's values."""

    def __init__(self) -> None:
        self._total = 0

    def check_before(self, operation: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise a TooLargeError if an operation's result would be too large, before it allocates memory."""
        tensors = list(_tensors((args, kwargs)))
        if operation in SPLITTING and any(max(tensor.shape, default=0) > MAX_PIECES for tensor in tensors):
            raise TooLargeError(f"it may have more than {MAX_PIECES} results")
        if operation not in GROWING:
            _check_shape(_broadcast_shape(tensors))
        elif operation is operator.getitem and any(tensor.dtype == torch.bool for tensor in tensors):
            # A mask selects at most all elements; an index in the same call can repeat the selection.
            _check_shape([tensor.numel() for tensor in tensors if tensor.dtype != torch.bool])
        else:
            # On the meta device an operation computes its output shapes without allocating memory.
            with torch.device("meta"), _CheckIntermediateShapes():
                operation(*_without_data(args), **_without_data(kwargs))

    def check_after(self, result: object) -> None:
        """Add the result's tensors to the datum's total; raises a TooLargeError beyond the limits."""
        for tensor in _tensors(result):
            if tensor.dim() > MAX_DIMS:
                raise TooLargeError(f"its result has {tensor.dim()} dimensions, more than {MAX_DIMS}")
            self._total += _check_shape(tensor.shape)
        if self._total > MAX_TOTAL:
            raise TooLargeError(f"the values of one datum have more than {MAX_TOTAL} elements")


class _CheckIntermediateShapes(TorchDispatchMode):
    """Checks the outputs of the elementary operations that an operation consists of."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            _check_shape(tensor.shape)
        return result


def _check_shape(shape: Sequence[int]) -> int:
    """Return the number of elements, in Python integers, which do not overflow."""
    num_elements = math.prod(shape)
    if num_elements > MAX_ELEMENTS:
        raise TooLargeError(f"a result would have {num_elements} elements, more than {MAX_ELEMENTS}")
    return num_elements


def _broadcast_shape(tensors: list[Tensor]) -> list[int]:
    shapes = [tensor.shape[::-1] for tensor in tensors]
    return [max(sizes) for sizes in zip_longest(*shapes, fillvalue=1)]


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)


def _without_data(value: Any) -> Any:
    """Replace tensors by meta tensors of the same shape, strides and dtype."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple):
        return tuple(_without_data(item) for item in value)
    if isinstance(value, list):
        return [_without_data(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _without_data(item) for key, item in value.items()}
    return value
