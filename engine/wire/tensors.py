"""Decode the protocol's tensors, dense or sparse CSR, to numpy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from tinker.proto import tinker_public_pb2 as pb

from engine.errors import RequestError

_DTYPES: dict[int, type[np.generic]] = {
    pb.DTYPE_FLOAT32: np.float32,
    pb.DTYPE_INT64: np.int64,
    pb.DTYPE_INT32: np.int32,
}
_MAX_DIMS = 8
_MAX_SIZE = 2**31 - 1


def num_sparse_elements(message: pb.Tensor) -> int:
    """Return the number of elements that a sparse tensor claims to have; 0 for a dense one."""
    if not message.HasField("sparse_csr"):
        return 0
    return math.prod(max(size, 0) for size in message.shape[:_MAX_DIMS])


def decode_tensor(message: pb.Tensor, name: str) -> NDArray[np.generic]:
    """Decode a tensor to a dense array.

    A dense tensor without a shape becomes one-dimensional. Entries that a sparse tensor does not list are 0. The caller
    bounds the size of a sparse tensor, whose few bytes can claim any shape.

    Args:
        name: the tensor's name in errors.

    Raises:
        RequestError: the dtype is unknown, the shape is out of range, or the data does not fit the shape.
    """
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise RequestError(f"{name} has dtype number {message.dtype}; send float32, int64 or int32.")
    if len(message.shape) > _MAX_DIMS:
        raise RequestError(f"{name} has {len(message.shape)} dimensions; use at most {_MAX_DIMS}.")
    shape = tuple(message.shape)
    if any(not 0 <= size <= _MAX_SIZE for size in shape):
        raise RequestError(f"{name} has the shape {shape}; use sizes of 0 to {_MAX_SIZE}.")
    if message.HasField("sparse_csr"):
        return _decode_csr(message.sparse_csr, np.dtype(dtype), shape, name)
    values = _read(message.dense, np.dtype(dtype), name)
    if not shape:
        return values
    if values.size != math.prod(shape):
        raise RequestError(
            f"{name} has {values.size} values, but its shape {shape} has {math.prod(shape)} elements: send one value "
            "per element."
        )
    return values.reshape(shape)


def _decode_csr(
    csr: pb.SparseCsr, dtype: np.dtype[np.generic], shape: tuple[int, ...], name: str
) -> NDArray[np.generic]:
    values = _read(csr.values, dtype, name)
    rows = _read(csr.crow_indices, np.dtype(np.int64), name).astype(np.int64)
    columns = _read(csr.col_indices, np.dtype(np.int64), name).astype(np.int64)
    counts = np.diff(rows)
    consistent = (
        len(shape) == 2
        and len(rows) == shape[0] + 1
        and rows[0] == 0
        and rows[-1] == len(values) == len(columns)
        and bool((counts >= 0).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not consistent:
        raise RequestError(f"{name} is not a valid sparse CSR tensor of shape {shape}: check its index arrays.")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def _read(data: bytes, dtype: np.dtype[np.generic], name: str) -> NDArray[np.generic]:
    if len(data) % dtype.itemsize:
        raise RequestError(f"{name} has {len(data)} bytes, which is not a multiple of the size of {dtype}.")
    return np.frombuffer(data, dtype)
