"""LoRA adapters on a shared base model: W x + (alpha / r) B A x (Hu et al. 2021, arXiv:2106.09685).

An adapter is a plain mapping from module names to its two factors. The base model's linear layers are wrapped
once; they read the adapter in use from one shared slot, so switching costs nothing, no adapter's gradient can
reach another's, and an adapter is gone when its mapping is. On disk the factors carry peft's names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import RequestError

ALPHA = 32.0  # what the hosted service and tinker-cookbook use at every rank
MAX_RANK = 1024


class Factors(NamedTuple):
    """`a` is ``(r, in)``, `b` is ``(out, r)``, float32."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """What shapes an adapter; `seed` fixes its first weights."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One LoRA adapter: its shape and its factors per module name."""

    spec: LoraSpec
    factors: Mapping[str, Factors]

    @property
    def scale(self) -> float:
        return ALPHA / self.spec.rank

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of each factor, always in the same order."""
        for module in sorted(self.factors):
            yield f"{module}.lora_A.weight", self.factors[module].a
            yield f"{module}.lora_B.weight", self.factors[module].b


class Share(NamedTuple):
    """Rows of a batch that are computed under one adapter; `rows_S` are their int64 indices, None for all of them."""

    adapter: Adapter
    rows_S: Tensor | None


class Slot:
    """The adapters in use on one base model, each with its rows; rows of none are the base model itself."""

    def __init__(self) -> None:
        self.shares: Sequence[Share] = ()

    @contextmanager
    def holding(self, shares: Sequence[Share]) -> Iterator[None]:
        before, self.shares = self.shares, shares
        try:
            yield
        finally:
            self.shares = before

    def add_to(self, y: Tensor, x: Tensor, name: str) -> Tensor:
        """``y`` and what the adapters make of ``x`` in the module ``name``; some rows only are added in place."""
        for adapter, rows_S in self.shares:
            if (factors := adapter.factors.get(name)) is None:
                continue
            if rows_S is None:
                y = y + lora_product(x, factors, adapter.scale)
            else:
                y.index_add_(0, rows_S, lora_product(x[rows_S], factors, adapter.scale).to(y.dtype))
        return y


class LoraLinear(nn.Module):
    """A frozen linear layer plus whatever the slot's adapters have for it."""

    def __init__(self, base: nn.Linear, name: str, slot: Slot) -> None:
        super().__init__()
        self.base = base
        self._name = name
        self._slot = slot

    def forward(self, x: Tensor) -> Tensor:
        return self._slot.add_to(self.base(x), x, self._name)


def lora_product(x: Tensor, factors: Factors, scale: float) -> Tensor:
    """``scale * B A x``, in the dtype of ``x``; the small product is scaled, not the large one."""
    down = nn.functional.linear(x, factors.a.to(x.dtype)) * scale
    return nn.functional.linear(down, factors.b.to(x.dtype))


def wrap_linears(root: nn.Module, prefix: str, slot: Slot) -> dict[str, nn.Linear]:
    """Put a `LoraLinear` in place of every linear layer under ``root``; returns the layers by full name."""
    found = {name: module for name, module in root.named_modules() if isinstance(module, nn.Linear)}
    for name, linear in found.items():
        parent, _, child = name.rpartition(".")
        setattr(root.get_submodule(parent), child, LoraLinear(linear, f"{prefix}{name}", slot))
    return {f"{prefix}{name}": linear for name, linear in found.items()}


def new_adapter(
    spec: LoraSpec, attn: Mapping[str, nn.Linear], mlp: Mapping[str, nn.Linear], head: Mapping[str, nn.Linear]
) -> Adapter:
    """A fresh adapter that changes nothing yet: B is 0, A is uniform as in peft, from the seed per module.

    Raises:
        RequestError: a rank that cannot be, or nothing to train.
    """
    if not 1 <= spec.rank <= MAX_RANK:
        raise RequestError(f"The LoRA rank is {spec.rank}; give 1 to {MAX_RANK}.")
    chosen = {
        **(attn if spec.train_attn else {}),
        **(mlp if spec.train_mlp else {}),
        **(head if spec.train_unembed else {}),
    }
    if not chosen:
        raise RequestError("Nothing is left to train: set train_mlp, train_attn or train_unembed.")
    return Adapter(spec, {name: _first_factors(spec, name, linear) for name, linear in chosen.items()})


def _first_factors(spec: LoraSpec, name: str, linear: nn.Linear) -> Factors:
    seed = int.from_bytes(blake2b(f"{spec.seed}:{name}".encode(), digest_size=8).digest()) >> 1
    generator = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(linear.in_features)  # Kaiming uniform with a = sqrt(5)
    a = (torch.rand(spec.rank, linear.in_features, generator=generator) * 2 - 1) * bound
    b = torch.zeros(linear.out_features, spec.rank)
    device = linear.weight.device
    return Factors(a.to(device).requires_grad_(), b.to(device).requires_grad_())
