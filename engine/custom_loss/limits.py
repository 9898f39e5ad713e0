"""Limits on the memory and the work of a graph, checked before and after each operation."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from engine.custom_loss.operations import (
    CHEAP,
    GROWING,
    INDICES,
    ITERATIVE,
    QUANTILES,
    REPEATED,
    SLOW,
    SPLITTING,
    Operation,
)
from engine.torch_internals import TorchDispatchMode, flop_registry

MAX_ELEMENTS = 2**24  # elements of one tensor, enough for all pairs of 4,096 tokens
MAX_TOTAL = 2**28  # elements of all tensors of a micro-batch; the gradient needs them until the end
MAX_FLOPS = 9 * 2**36  # of a micro-batch; a product of 4,096 x 4,096 matrices with its gradient takes two thirds
MAX_PIECES = 2**16  # results of one split
MAX_DIMS = 8

# Work as the FLOPs of a matrix product that takes as long, estimated from times on a CPU.
_CALL_FLOPS = 2**20
_GRADIENT = 3  # factor of an operation with its gradient; the gradient alone takes about two operations
_CHEAP_ELEMENT_FLOPS = 2**5
_ELEMENT_FLOPS = 2**8
_SLOW_ELEMENT_FLOPS = 2**10
_ITERATIVE_ELEMENT_FLOPS = 2**14
_SVD_FLOPS = 2**6
_POWERS_AND_TRANSFORMS = [
    getattr(torch.ops.aten, name) for name in ("pow", "norm", "linalg_vector_norm", "_fft_c2c", "_fft_r2c", "_fft_c2r")
]


class TooLargeError(ValueError):
    """Value beyond the limits; the message is a clause."""


class Limits:
    """Limits on the memory and the work of the datums of one micro-batch, which are computed together."""

    def __init__(self) -> None:
        self._num_elements = 0
        self._flops = 0

    def check_before(self, operation: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise a TooLargeError if an operation would take too much memory or work, before it takes any."""
        tensors = list(_tensors((args, kwargs)))
        has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        # A gradient of many elements takes long to write, whatever the operation is.
        cheap_flops = _ELEMENT_FLOPS if has_gradient else _CHEAP_ELEMENT_FLOPS
        if operation in SPLITTING and any(max(tensor.shape, default=0) > MAX_PIECES for tensor in tensors):
            raise TooLargeError(f"it may have more than {MAX_PIECES} results")
        if operation not in GROWING:
            shape = _broadcast_shape(tensors)
            if operation in INDICES and len(args) + len(kwargs.keys() - {"as_tuple"}) == 1:
                shape.append(max(len(shape), 1))
            if operation in QUANTILES:  # one result for each element of the second argument
                shape += [quantiles.numel() for quantiles in _tensors((args[1:], kwargs.get("q")))]
            num_elements = _check_shape(shape)
            flops = num_elements * _flops_per_element(operation, args, kwargs, cheap_flops)
        elif operation is operator.getitem and any(tensor.dtype == torch.bool for tensor in _tensors(args[1:])):
            # A mask selects at most all elements; an index in the same call can repeat the selection.
            flops = _check_shape([args[0].numel(), *_index_sizes(args[1])]) * cheap_flops
        else:
            # On the meta device an operation computes its output shapes without allocating memory.
            meta_args, meta_kwargs = _without_data(args), _without_data(kwargs)
            with torch.device("meta"), _ElementaryOperations(cheap_flops) as elementary:
                operation(*meta_args, **meta_kwargs)
            flops = elementary.flops
        if has_gradient:
            flops *= _GRADIENT
        self._flops += _CALL_FLOPS + flops
        if self._flops > MAX_FLOPS:
            raise TooLargeError(
                f"with it, the loss takes about {self._flops:.1e} FLOPs, more than {MAX_FLOPS:.1e}, on the datums that "
                "are computed together: use fewer or cheaper operations, or smaller tensors"
            )

    def check_after(self, result: object) -> None:
        """Add the result's tensors to the total; raise a TooLargeError if a limit is exceeded."""
        for tensor in _tensors(result):
            if tensor.dim() > MAX_DIMS:
                raise TooLargeError(f"its result has {tensor.dim()} dimensions, more than {MAX_DIMS}")
            self._num_elements += _check_shape(tensor.shape)
        if self._num_elements > MAX_TOTAL:
            raise TooLargeError(
                f"with it, the values of the datums that are computed together have more than {MAX_TOTAL} elements: "
                "use fewer operations, or smaller tensors"
            )


class _ElementaryOperations(TorchDispatchMode):
    """Checks the outputs of the elementary operations that an operation consists of, and adds up their work."""

    def __init__(self, cheap_flops: int) -> None:
        super().__init__()
        self._cheap_flops = cheap_flops
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        num_elements = sum(_check_shape(tensor.shape) for tensor in _tensors(result))
        if not func.is_view:
            per_element = _ELEMENT_FLOPS if func.overloadpacket in _POWERS_AND_TRANSFORMS else self._cheap_flops
            self.flops += _elementary_flops(func.overloadpacket, args, kwargs or {}, result, num_elements, per_element)
        return result


def _elementary_flops(
    packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object, num_elements: int, per_element: int
) -> int:
    """Estimate the work of an elementary operation; ``per_element`` applies to operations without a special case."""
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=result)
    if packet is torch.ops.aten._cdist_forward:
        rows, _, p = args[:3]
        return num_elements * rows.shape[-1] * (_CHEAP_ELEMENT_FLOPS if p in (0, 1, 2, math.inf) else _ELEMENT_FLOPS)
    if packet is torch.ops.aten._euclidean_dist:
        return num_elements * 2 * args[0].shape[-1]
    if packet is torch.ops.aten._linalg_svd:
        return args[0].numel() * min(args[0].shape[-2:]) * _SVD_FLOPS
    return max(num_elements, *(tensor.numel() for tensor in _tensors(args)), 0) * per_element


def _flops_per_element(operation: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any], cheap_flops: int) -> int:
    """Estimate the work per element of an operation that is not in `GROWING`."""
    if operation in REPEATED:
        repeats = kwargs.get("n", args[1] if len(args) > 1 else 1)
        return cheap_flops * max(repeats, 1)
    if operation in ITERATIVE:
        return _ITERATIVE_ELEMENT_FLOPS
    if operation in SLOW:
        return _SLOW_ELEMENT_FLOPS
    return cheap_flops if operation in CHEAP else _ELEMENT_FLOPS


def _check_shape(shape: Sequence[int]) -> int:
    """Return the number of elements as an integer that cannot overflow; raise a TooLargeError if it is too large."""
    num_elements = math.prod(shape)
    if num_elements > MAX_ELEMENTS:
        raise TooLargeError(
            f"a result would have {num_elements} elements, more than {MAX_ELEMENTS}: use smaller tensors"
        )
    return num_elements


def _broadcast_shape(tensors: list[Tensor]) -> list[int]:
    """Return the sizes of the broadcast tensors, last dimension first; torch itself rejects shapes that do not fit."""
    shapes = [tensor.shape[::-1] for tensor in tensors]
    return [max(sizes) for sizes in zip_longest(*shapes, fillvalue=1)]


def _index_sizes(index: object) -> Iterator[int]:
    """Sizes of the indices in an index of `operator.getitem` that can repeat elements: integer tensors, and lists."""
    if isinstance(index, Tensor):
        yield index.numel() if index.dtype != torch.bool else 1
    elif isinstance(index, tuple) or (isinstance(index, list) and next(_tensors(index), None) is not None):
        for part in index:
            yield from _index_sizes(part)
    elif isinstance(index, list):
        yield _num_leaves(index)


def _num_leaves(nested: list[Any]) -> int:
    return sum(_num_leaves(item) if isinstance(item, list) else 1 for item in nested)


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
