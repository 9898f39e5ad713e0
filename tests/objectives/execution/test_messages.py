"""Tensors in messages between a run and the processes and workers of its terms."""

from __future__ import annotations

import pickle
from multiprocessing import Pipe

import pytest
import torch
from torch import Tensor

from objectives.execution.messages import encode, receive, send

TENSORS = [
    torch.tensor(1.5),
    torch.tensor(True),
    torch.zeros(0, 2),
    torch.arange(6.0).reshape(2, 3).T,
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
    torch.tensor([1 + 2j]).conj(),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: str(tuple(tensor.shape)))
def test_tensors_arrive_unchanged_and_writable(tensor: Tensor) -> None:
    ours, theirs = Pipe()
    send(ours, [tensor])
    for (received,) in (receive(theirs), pickle.loads(encode([tensor]))):
        assert received.shape == tensor.shape
        assert received.dtype == tensor.dtype
        assert torch.equal(received, tensor)
        received.zero_()
