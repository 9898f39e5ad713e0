"""Groups of batch rows that one forward pass computes.

The fast way is one group of all rows. The last bits of a row then depend on the other rows, because attention is as
wide as the longest row, and because a product of a single row uses another kernel. The deterministic way is groups of
two or more rows with one adapter and one attention width. The products of oneDNN, attention per row and head, and
row-wise activations give a row the same bits in any such group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.compute.kv_cache import round_up
from engine.compute.lora import Adapter, AdapterRows
from engine.sampling.request import Row


class RowGroup(NamedTuple):
    """Rows of one forward pass.

    Attributes:
        rows_G: int64 indices of the rows in the batch.
        num_rows: number of real rows; a row behind them is padding, a copy of the only real row.
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
            indices_S = None if len(indices) == len(adapters) else torch.tensor(indices, device=device)
            assignments.append(AdapterRows(adapter, indices_S))
    return RowGroup(torch.arange(len(rows)), len(rows), None, assignments)


def uniform_groups(rows: Sequence[Row]) -> Iterator[RowGroup]:
    """Split rows by adapter and attention width, such that no row's numbers depend on other rows."""
    similar: dict[tuple[Adapter | None, int], list[int]] = {}
    for index, row in enumerate(rows):
        similar.setdefault((row.request.adapter, round_up(row.num_tokens)), []).append(index)
    for (adapter, width), indices in similar.items():
        assignments = [] if adapter is None else [AdapterRows(adapter, None)]
        padded = indices if len(indices) > 1 else indices * 2
        yield RowGroup(torch.tensor(padded), len(indices), width, assignments)
