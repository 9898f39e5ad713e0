"""Messages between a run and the processes of its terms: pickles, with every tensor as one packed buffer."""

from __future__ import annotations

import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor


def send(connection: Connection, message: object) -> None:
    """Send a message whole.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: something in it cannot leave its process; nothing is sent.
        OSError: the other side is gone.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(message)
    connection.send_bytes(len(buffers).to_bytes(4, "little") + stream.getvalue())
    for buffer in buffers:
        connection.send_bytes(buffer.raw())


def receive(connection: Connection) -> Any:
    """The next message.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    head = connection.recv_bytes()
    # Writable, as tensors are.
    buffers = [bytearray(connection.recv_bytes()) for _ in range(int.from_bytes(head[:4], "little"))]
    return pickle.loads(memoryview(head)[4:], buffers=buffers)


def encode(message: object) -> bytes:
    """A message in one piece, which `pickle.loads` reads, for what carries bytes alone.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: something in it cannot leave its process.
    """
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(message)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return _tensor, (np.ascontiguousarray(obj.detach().cpu().numpy()),)
        return NotImplemented


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array)
