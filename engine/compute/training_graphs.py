"""CUDA graphs of training passes. A pass of a small model takes longer to launch, kernel by kernel, than to compute."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.compute.lora import Adapter, Factors, LoraSpec

MAX_SHAPES = 16  # each keeps the hidden states, the factors and the gradients of both
_LENGTH_STEP = 64  # tokens
_MAX_PADDING = 1.25  # factor by which rounding may enlarge a pass
_SMALL_PASS = 2048  # tokens below which a pass takes longer to launch than to compute, however much of it is padding

Decode = Callable[[Adapter, Tensor], Tensor]
"""Computation of the last hidden states ``(B, T, H)`` of right-padded tokens ``(B, T)`` under an adapter."""


def rounded_shape(num_rows: int, length: int) -> tuple[int, int]:
    """Round a batch up to a shape that later batches are likely to have too, or return it unchanged.

    Lengths are rounded to multiples of 64; 8 to 15 rows to multiples of 2, 16 to 31 rows to multiples of 4, and so on.
    A batch that this would enlarge by more than a quarter keeps its shape, unless it is small.

    >>> rounded_shape(7, 100), rounded_shape(61, 190), rounded_shape(64, 130)
    ((7, 128), (64, 192), (64, 130))
    """
    row_step = max(1, 2 ** (num_rows.bit_length() - 3))
    rows = -(-num_rows // row_step) * row_step
    tokens = -(-length // _LENGTH_STEP) * _LENGTH_STEP
    is_close = rows * tokens <= max(_MAX_PADDING * num_rows * length, _SMALL_PASS)
    return (rows, tokens) if is_close else (num_rows, length)


class TrainingGraphs:
    """Passes of one decoder, captured at the second use of a shape. The least recently used shapes are dropped.

    A graph has an adapter of its own, at fixed addresses, and copies the weights of the adapter in training into it.
    So adapters of the same rank and modules share the graph of a shape.
    """

    def __init__(self, decode: Decode) -> None:
        """Create an empty set of graphs.

        Args:
            decode: function that launches the pass; it must not read values back from the device.
        """
        self._decode = decode
        self._passes: OrderedDict[tuple[LoraSpec, torch.Size], _Pass | None] = OrderedDict()
        self._pool: Any = None

    def hidden(self, adapter: Adapter, names: list[str], tokens_BT: Tensor) -> Tensor:
        """Compute the last hidden states ``(B, T, H)``, differentiable in the factors of the modules ``names``."""
        num_rows, length = tokens_BT.shape
        rows, tokens = rounded_shape(num_rows, length)
        padded_BT = nn.functional.pad(tokens_BT, (0, tokens - length, 0, rows - num_rows))
        key = (replace(adapter.spec, seed=0), padded_BT.shape)
        # The first pass of a shape is not captured: libraries allocate workspaces in it, which no graph may contain.
        if key not in self._passes:
            self._passes[key] = None
            if len(self._passes) > MAX_SHAPES:
                self._passes.popitem(last=False)
            hidden_BTH = self._decode(adapter, padded_BT)
        else:
            captured = self._passes[key]
            if captured is None:
                captured = self._passes[key] = self._capture(adapter, names, padded_BT)
            self._passes.move_to_end(key)
            hidden_BTH = _Replay.apply(captured, padded_BT, *_factors(adapter, names))
        return hidden_BTH[:num_rows, :length]

    def _capture(self, adapter: Adapter, names: list[str], tokens_BT: Tensor) -> _Pass:
        if not any(self._passes.values()):
            self._pool = torch.cuda.graph_pool_handle()  # the pool of dropped graphs cannot be used again
        return _Pass(self._decode, adapter, names, tokens_BT, self._pool)


class _Pass:
    """Captured forward and backward pass. The next forward pass overwrites the activations that a backward pass reads.

    Attributes:
        sizes: number of elements of each factor.
    """

    def __init__(self, decode: Decode, adapter: Adapter, names: list[str], tokens_BT: Tensor, pool: Any) -> None:
        self._tokens_BT = tokens_BT.clone()
        shapes = [factor.shape for factor in _factors(adapter, names)]
        self.sizes = [shape.numel() for shape in shapes]
        # One tensor for all factors, so that one operation copies them, and one collects their gradients.
        self._weights_W = torch.zeros(sum(self.sizes), device=tokens_BT.device, requires_grad=True)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.enable_grad():
            with torch.cuda.graph(self._forward, pool=pool, capture_error_mode="thread_local"):
                parts = self._weights_W.split(self.sizes)
                factors = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
                copy = {name: Factors(*factors[2 * i : 2 * i + 2]) for i, name in enumerate(names)}
                hidden_BTH = decode(Adapter(adapter.spec, copy), self._tokens_BT)
            self._hidden_gradient_BTH = torch.zeros_like(hidden_BTH)
            with torch.cuda.graph(self._backward, pool=pool, capture_error_mode="thread_local"):
                (self._gradient_W,) = torch.autograd.grad(hidden_BTH, self._weights_W, self._hidden_gradient_BTH)
        self._hidden_BTH = hidden_BTH.detach()

    def forward(self, tokens_BT: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
        """Compute the hidden states of tokens of the captured shape."""
        self._tokens_BT.copy_(tokens_BT)
        torch.cat([factor.detach().flatten() for factor in factors], out=self._weights_W.detach())
        self._forward.replay()
        return self._hidden_BTH.clone()

    def backward(self, gradient_BTH: Tensor) -> Tensor:
        """Compute the concatenated gradients ``(W,)`` of all factors from the gradient of the hidden states."""
        self._hidden_gradient_BTH.copy_(gradient_BTH)
        self._backward.replay()
        return self._gradient_W.clone()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: _Pass, tokens_BT: Tensor, *factors: Tensor) -> Tensor:
        ctx.captured, ctx.shapes = captured, [factor.shape for factor in factors]
        return captured.forward(tokens_BT, factors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.captured.backward(grad_outputs[0]).split(ctx.captured.sizes)
        return None, None, *(part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True))


def _factors(adapter: Adapter, names: list[str]) -> list[Tensor]:
    return [factor for name in names for factor in adapter.factors[name]]
