"""Micro-batches of sequences of similar length, which need little padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def micro_batches(lengths_D: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group the indices of ``D`` sequences by length, longest first; ties keep their order.

    A group has at most ``max_tokens`` tokens, including padding, or a single sequence.

    >>> micro_batches([3, 8, 4], max_tokens=8)
    [[1], [2, 0]]
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths_D)), key=lambda index: -lengths_D[index]):
        if groups and lengths_D[groups[-1][0]] * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def pad_right(rows_B: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad rows to one ``(B, T)`` tensor; also return the flat indices ``(N,)`` of its real elements, row by row.

    Padding is on the right, where a causal model never attends, so no attention mask is needed.

    >>> pad_right([torch.tensor([7, 8]), torch.tensor([9])])
    (tensor([[7, 8],
            [9, 0]]), tensor([0, 1, 2]))
    """
    padded_BT = torch.nn.utils.rnn.pad_sequence(list(rows_B), batch_first=True)
    width = padded_BT.shape[1]
    real_N = torch.cat([torch.arange(i * width, i * width + len(row)) for i, row in enumerate(rows_B)])
    return padded_BT, real_N
