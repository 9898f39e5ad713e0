"""Messages between a run and the processes of its terms: pickles with tensors as out-of-band buffers."""

from __future__ import annotations

import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor


def send(connection: Connection, message: object) -> None:
    """Send a message.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: an object cannot be pickled; nothing is sent.
        OSError: the connection is closed.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(message)
    connection.send_bytes(len(buffers).to_bytes(4, "little") + stream.getvalue())
    for buffer in buffers:
        connection.send_bytes(buffer.raw())


def receive(connection: Connection) -> Any:
    """Receive the next message.

    Raises:
        EOFError, OSError: the connection is closed.
    """
    head = connection.recv_bytes()
    # bytearray, because the memory of tensors must be writable.
    buffers = [bytearray(connection.recv_bytes()) for _ in range(int.from_bytes(head[:4], "little"))]
    return pickle.loads(memoryview(head)[4:], buffers=buffers)


def encode(message: object) -> bytes:
    """Encode a message as bytes for `pickle.loads`.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: an object cannot be pickled.
    """
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(message)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Tensor):
            tensor = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
            # numpy has no bfloat16.
            plain = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
            return _tensor, (plain.numpy(), tensor.dtype)
        return NotImplemented


def _tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(array).view(dtype)
