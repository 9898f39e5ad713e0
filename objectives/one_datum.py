"""What a term sees of its batch while it is traced for a loss that runs on the service: one datum, and no figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch.fx import Node, Proxy, Tracer

from objectives.errors import UntraceableError

# Where a node says that it sums over its datum, which `sum_by_datum` does and no operation of torch.
BY_DATUM = "by_datum"

_METRICS = "return its metrics as 0-d tensors"


class OneDatum:
    """The fields of `Batch` that a datum has by itself, as proxies; whoever asks for another hears why it is not there.

    Attributes:
        target_tokens_DT, weights_DT, mask_DT, advantages_DT: as of `Batch`, of one datum.
    """

    __slots__ = ("advantages_DT", "mask_DT", "target_tokens_DT", "weights_DT")

    def __init__(self, target_tokens_DT: Any, weights_DT: Any, mask_DT: Any, advantages_DT: Any | None) -> None:
        self.target_tokens_DT, self.weights_DT = target_tokens_DT, weights_DT
        self.mask_DT, self.advantages_DT = mask_DT, advantages_DT

    def __getattr__(self, name: str) -> NoReturn:
        raise UntraceableError(f"it reads {name} of the batch, and the service sees one datum at a time")

    def sum(self, values_T: Any) -> Any:
        """The sum over the trained tokens, 0-d."""
        total: Any = torch.where(self.mask_DT, values_T, 0.0).sum()
        total.node.meta[BY_DATUM] = True
        return total


class TermTracer(Tracer):
    """torch.fx's tracer, whose refusals say what to write instead."""

    def proxy(self, node: Node) -> Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: Proxy) -> bool:
        raise UntraceableError("it branches on the values or the shape of a tensor: use torch.where")

    def iter(self, obj: Proxy) -> Iterator[Any]:
        raise UntraceableError("it loops over a tensor: use operations on all of it")


class _Proxy(Proxy):
    """A tensor that has no values yet."""

    def __float__(self) -> float:
        raise UntraceableError(f"it calls float() on a tensor: {_METRICS}")

    def __int__(self) -> int:
        raise UntraceableError(f"it calls int() on a tensor: {_METRICS}")

    def __index__(self) -> int:
        raise UntraceableError("it takes a tensor for a whole number")
