"""Groups of batch rows that one forward pass computes.

The fast way is one group of all rows. Kernels then choose the order of their sums by the number of rows, so the last
bits of a row depend on the other rows. The deterministic way is groups of a fixed size, each with one adapter and one
attention width. All tensor shapes then follow from the row itself, and so do its bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.compute.kv_cache import round_up
from engine.compute.lora import Adapter, AdapterRows
from engine.sampling.request import Row

GROUP_SIZE = 16  # rows: smaller groups read the weights too often for many rows, larger groups slow down a single row


class RowGroup(NamedTuple):
    """Rows of one forward pass.

    Attributes:
        rows_G: int64 indices of the rows in the batch.
        num_rows: number of real rows; the rows behind them are padding, copies of the last real row.
        width: number of cached tokens to attend to; None is the length of the longest row.
        adapters: the adapters and their rows within the group.
    """

    rows_G: Tensor
    num_rows: int
    width: int | None
    adapters: Sequence[AdapterRows]


def group_all(rows: Sequence[Row], device: torch.device) -> RowGroup:
    """Put all rows into one group."""
    adapters = [row.request.adapter for row in rows]
    assignments = []
    for adapter in dict.fromkeys(adapters):
        if adapter is not None:
            indices = [index for index, other in enumerate(adapters) if other is adapter]
            rows_S = None if len(indices) == len(adapters) else torch.tensor(indices, device=device)
            assignments.append(AdapterRows(adapter, rows_S))
    return RowGroup(torch.arange(len(rows)), len(rows), None, assignments)


def fixed_size_groups(rows: Sequence[Row]) -> Iterator[RowGroup]:
    """Split rows into groups of `GROUP_SIZE`, such that no row's numbers depend on other rows."""
    similar: dict[tuple[Adapter | None, int], list[int]] = {}
    for index, row in enumerate(rows):
        similar.setdefault((row.request.adapter, round_up(row.num_tokens)), []).append(index)
    for (adapter, width), indices in similar.items():
        assignments = [] if adapter is None else [AdapterRows(adapter, None)]
        for start in range(0, len(indices), GROUP_SIZE):
            real = indices[start : start + GROUP_SIZE]
            padded = real + real[-1:] * (GROUP_SIZE - len(real))
            yield RowGroup(torch.tensor(padded), len(real), width, assignments)
