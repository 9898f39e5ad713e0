"""LoRA adapters on a shared base model: W x + (alpha / r) B A x (Hu et al. 2021, arXiv:2106.09685).

An adapter maps the name of each adapted module to two factors. The base model's linear layers are wrapped once and read
the active adapters from a shared object. Switching adapters is therefore free, and gradients never reach an inactive
adapter. The layers keep no reference to an inactive adapter, so its memory is freed with its last owner. On disk the
factors have peft's names.
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

from engine.compute.linear import frozen_linear, linear, lora_linear
from engine.errors import RequestError

ALPHA = 32.0  # the hosted service and tinker-cookbook use this value at every rank
MAX_RANK = 1024


class Factors(NamedTuple):
    """Low-rank factors in float32: `a` is ``(r, in)``, `b` is ``(out, r)``."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Shape of an adapter; `seed` determines its initial weights."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """One LoRA adapter: its shape and its factors by module name."""

    spec: LoraSpec
    factors: Mapping[str, Factors]

    @property
    def scale(self) -> float:
        return ALPHA / self.spec.rank

    @property
    def num_bytes(self) -> int:
        """Memory of the factors."""
        return sum(factor.nbytes for factors in self.factors.values() for factor in factors)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and tensor of each factor, in a fixed order."""
        for module in sorted(self.factors):
            yield f"{module}.lora_A.weight", self.factors[module].a
            yield f"{module}.lora_B.weight", self.factors[module].b


class AdapterRows(NamedTuple):
    """Rows of a batch computed under one adapter.

    Attributes:
        rows: int64 row indices; or a float mask with 0 or 1 for each row of the batch, whose fixed shape lets one CUDA
            graph serve any selection of rows; or None for all rows.
    """

    adapter: Adapter
    rows: Tensor | None


class ActiveAdapters:
    """Adapters that the wrapped layers of one base model apply, each to its rows. Other rows use the base model."""

    def __init__(self) -> None:
        self.assignments: Sequence[AdapterRows] = ()

    @contextmanager
    def activate(self, assignments: Sequence[AdapterRows]) -> Iterator[None]:
        previous, self.assignments = self.assignments, assignments
        try:
            yield
        finally:
            self.assignments = previous

    def apply(self, layer: nn.Linear, name: str, x: Tensor) -> Tensor:
        """Compute the output of the frozen layer ``name``, plus the outputs of the adapters that adapt it."""
        adapted = [
            (adapter.factors[name], adapter.scale, rows)
            for adapter, rows in self.assignments
            if name in adapter.factors
        ]
        if len(adapted) == 1 and adapted[0][2] is None:
            factors, scale, _ = adapted[0]
            return lora_linear(x, layer, factors.a, factors.b, scale)
        y = frozen_linear(x, layer)
        for factors, scale, rows in adapted:
            assert rows is not None, "an adapter of all rows is the only one"
            if rows.is_floating_point():
                mask = rows.to(x.dtype).view(-1, *[1] * (x.dim() - 1))
                down = linear(x, factors.a.to(x.dtype)) * (scale * mask)
                y += linear(down, factors.b.to(x.dtype)).to(y.dtype)
            else:
                down = linear(x[rows], factors.a.to(x.dtype)) * scale
                y.index_add_(0, rows, linear(down, factors.b.to(x.dtype)).to(y.dtype))
        return y


class LoraLinear(nn.Module):
    """Frozen linear layer plus the outputs of the active adapters."""

    def __init__(self, base: nn.Linear, name: str, active: ActiveAdapters) -> None:
        super().__init__()
        self.base = base
        self._name = name
        self._active = active

    def forward(self, x: Tensor) -> Tensor:
        return self._active.apply(self.base, self._name, x)


def wrap_linears(root: nn.Module, prefix: str, active: ActiveAdapters) -> dict[str, nn.Linear]:
    """Replace every linear layer under ``root`` by a `LoraLinear`; return the original layers by full name.

    Subclasses, such as routers of experts, stay as they are: some return more than the product.
    """
    linears = {name: module for name, module in root.named_modules() if type(module) is nn.Linear}
    for name, layer in linears.items():
        parent, _, child = name.rpartition(".")
        setattr(root.get_submodule(parent), child, LoraLinear(layer, f"{prefix}{name}", active))
    return {f"{prefix}{name}": layer for name, layer in linears.items()}


def new_adapter(
    spec: LoraSpec, attn: Mapping[str, nn.Linear], mlp: Mapping[str, nn.Linear], head: Mapping[str, nn.Linear]
) -> Adapter:
    """Create an adapter that does not change the model yet: B is 0, A is uniform as in peft, seeded per module.

    Raises:
        RequestError: the rank is out of range, or no module is selected.
    """
    if not 1 <= spec.rank <= MAX_RANK:
        raise RequestError(f"The LoRA rank is {spec.rank}; use 1 to {MAX_RANK}.")
    selected = {
        **(attn if spec.train_attn else {}),
        **(mlp if spec.train_mlp else {}),
        **(head if spec.train_unembed else {}),
    }
    if not selected:
        empty = [name for name in ("train_attn", "train_mlp") if getattr(spec, name)]
        reason = f", because the model has no linear layers for {' and '.join(empty)}" if empty else ""
        raise RequestError(
            f"The adapter has no modules to train{reason}: set another of train_mlp, train_attn and train_unembed."
        )
    return Adapter(spec, {name: _initial_factors(spec, name, linear) for name, linear in selected.items()})


def _initial_factors(spec: LoraSpec, name: str, linear: nn.Linear) -> Factors:
    seed = int.from_bytes(blake2b(f"{spec.seed}:{name}".encode(), digest_size=8).digest()) >> 1
    generator = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(linear.in_features)  # Kaiming uniform with a = sqrt(5)
    a = (torch.rand(spec.rank, linear.in_features, generator=generator) * 2 - 1) * bound
    b = torch.zeros(linear.out_features, spec.rank)
    device = linear.weight.device
    return Factors(a.to(device).requires_grad_(), b.to(device).requires_grad_())
