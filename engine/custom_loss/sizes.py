"""What a graph's values may take of memory, looked at before each operation and after it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.custom_loss.operations import GROWING, SPLITTING, Operation

MAX_ELEMENTS = 2**24  # of one tensor: the pairs of 4,096 tokens
MAX_TOTAL = 2**28  # of all the tensors of one datum; the gradient needs them to the end
MAX_PIECES = 2**16
MAX_DIMS = 8


class TooLargeError(ValueError):
    """A value beyond the limits; the message is a clause."""


class Sizes:
    """The memory of one datum's values."""

    def __init__(self) -> None:
        self._total = 0

    def check_before(self, operation: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse an operation whose result would be too large, before it takes the memory."""
        tensors = list(_tensors((args, kwargs)))
        if operation in SPLITTING and any(max(each.shape, default=0) > MAX_PIECES for each in tensors):
            raise TooLargeError(f"it may have more than {MAX_PIECES} results")
        if operation not in GROWING:
            _check(_broadcast_shape(tensors))
        elif operation is operator.getitem and any(each.dtype == torch.bool for each in tensors):
            # A mask selects at most what is there; an index beside it may repeat that.
            _check([each.numel() for each in tensors if each.dtype != torch.bool])
        else:
            # Without data an operation takes no memory, and says all the same how much it would.
            with torch.device("meta"), _CheckEach():
                operation(*_without_data(args), **_without_data(kwargs))

    def check_after(self, result: Any) -> None:
        """Count what came out."""
        for tensor in _tensors(result):
            if tensor.dim() > MAX_DIMS:
                raise TooLargeError(f"its result has {tensor.dim()} dimensions, more than {MAX_DIMS}")
            self._total += _check(tensor.shape)
        if self._total > MAX_TOTAL:
            raise TooLargeError(f"the values of one datum have more than {MAX_TOTAL} elements")


class _CheckEach(TorchDispatchMode):
    """Checks also the results of the steps that an operation is made of."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            _check(tensor.shape)
        return result


def _check(sizes: Sequence[int]) -> int:
    """The product, in Python's numbers, which do not overflow."""
    num_elements = math.prod(sizes)
    if num_elements > MAX_ELEMENTS:
        raise TooLargeError(f"a result would have {num_elements} elements, more than {MAX_ELEMENTS}")
    return num_elements


def _broadcast_shape(tensors: list[Tensor]) -> list[int]:
    shapes = [each.shape[::-1] for each in tensors]
    return [max(sizes) for sizes in zip_longest(*shapes, fillvalue=1)]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)


def _without_data(value: Any) -> Any:
    """The same value with tensors that have a shape only."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple):
        return tuple(_without_data(each) for each in value)
    if isinstance(value, list):
        return [_without_data(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _without_data(each) for key, each in value.items()}
    return value
