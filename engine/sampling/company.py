"""Which rows of the running batch are computed together.

All of them, for speed: then a matrix product has as many rows as there happen to be, and by its shape the kernels
choose the order of their sums, so that the last bits of a row depend on its company. Or in companies of one size, each
of rows under one adapter that look back equally far: every shape follows from the row itself, and so do its bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.compute.lora import Adapter, Share
from engine.compute.slots import rounded_up
from engine.sampling.request import Row

SIZE = 16  # rows: with fewer, many rows read the weights too often; with more, a single one pays too much


class Company(NamedTuple):
    """Rows that one pass computes.

    Attributes:
        rows_C: int64, their indices in the batch.
        num_rows: how many of them count; those behind repeat one, to fill up the company.
        width: how many tokens of their slots are looked at; None for as many as the longest has.
        shares: of adapters.
    """

    rows_C: Tensor
    num_rows: int
    width: int | None
    shares: Sequence[Share]


def one_company(rows: Sequence[Row], device: torch.device) -> Company:
    """Of all rows."""
    adapters = [row.request.adapter for row in rows]
    shares = []
    for adapter in dict.fromkeys(adapters):
        if adapter is not None:
            of_it = [index for index, other in enumerate(adapters) if other is adapter]
            shares.append(Share(adapter, None if len(of_it) == len(adapters) else torch.tensor(of_it, device=device)))
    return Company(torch.arange(len(rows)), len(rows), None, shares)


def equal_companies(rows: Sequence[Row]) -> Iterator[Company]:
    """Of `SIZE` rows each, in which no row's numbers depend on the others."""
    alike: dict[tuple[Adapter | None, int], list[int]] = {}
    for index, row in enumerate(rows):
        alike.setdefault((row.request.adapter, rounded_up(row.num_tokens)), []).append(index)
    for (adapter, width), indices in alike.items():
        shares = [] if adapter is None else [Share(adapter, None)]
        for start in range(0, len(indices), SIZE):
            some = indices[start : start + SIZE]
            filled = some + some[-1:] * (SIZE - len(some))
            yield Company(torch.tensor(filled), len(some), width, shares)
