"""Proxies of one datum, on which terms are traced for a loss that runs on the service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, TypeAlias

import torch
from torch.fx import Node, Proxy, Tracer

from objectives.errors import UntraceableError

# Metadata key of a node that sums over its datum (`sum_by_datum`); torch has no such operation.
BY_DATUM = "by_datum"
# Metadata key of a node that sums over the preceding tokens of its datum (`prefix_sum_by_datum`).
PREFIX_BY_DATUM = "prefix_by_datum"

_METRICS = "return its metrics as 0-d tensors"

TensorLike: TypeAlias = Any
"""A tensor, or a `torch.fx` proxy of one, which supports the same operations."""


class OneDatum:
    """Fields of `Batch` for a single datum, as proxies; any other field raises `UntraceableError`.

    Attributes:
        target_tokens_DT, weights_DT, mask_DT, advantages_DT, untempered_logprobs_DT: see `Batch`.
    """

    __slots__ = ("advantages_DT", "mask_DT", "target_tokens_DT", "untempered_logprobs_DT", "weights_DT")

    def __init__(
        self,
        target_tokens_DT: TensorLike,
        weights_DT: TensorLike,
        mask_DT: TensorLike,
        advantages_DT: TensorLike | None,
        untempered_logprobs_DT: TensorLike | None,
    ) -> None:
        self.target_tokens_DT, self.weights_DT = target_tokens_DT, weights_DT
        self.mask_DT, self.advantages_DT = mask_DT, advantages_DT
        self.untempered_logprobs_DT = untempered_logprobs_DT

    def __getattr__(self, name: str) -> NoReturn:
        raise UntraceableError(f"it reads {name} of the batch, but the service evaluates one datum at a time")

    def sum(self, values_T: TensorLike) -> TensorLike:
        """Sum over the trained tokens, 0-d."""
        total: TensorLike = torch.where(self.mask_DT, values_T, 0.0).sum()
        total.node.meta[BY_DATUM] = True
        return total

    def prefix_sum(self, values_T: TensorLike) -> TensorLike:
        """Sum over the trained tokens up to and including each token, ``(T,)``."""
        sums: TensorLike = torch.where(self.mask_DT, values_T, 0.0).cumsum(0)
        sums.node.meta[PREFIX_BY_DATUM] = True
        return sums


class TermTracer(Tracer):
    """`torch.fx` tracer with error messages that include the fix."""

    def proxy(self, node: Node) -> Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: Proxy) -> bool:
        raise UntraceableError("it branches on the values or the shape of a tensor; use torch.where")

    def iter(self, obj: Proxy) -> Iterator[Proxy]:
        raise UntraceableError("it loops over a tensor; use operations on the whole tensor")


class _Proxy(Proxy):
    """Proxy of a tensor without values."""

    def __float__(self) -> float:
        raise UntraceableError(f"it calls float() on a tensor; {_METRICS}")

    def __int__(self) -> int:
        raise UntraceableError(f"it calls int() on a tensor; {_METRICS}")

    def __index__(self) -> int:
        raise UntraceableError("it uses a tensor as an integer index")
