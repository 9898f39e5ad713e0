"""Linear layers with frozen weights and LoRA factors. oneDNN computes them in float32 on a CPU, torch all others.

torch computes float32 products with MKL, which uses AVX-512 on Intel's processors only; oneDNN uses it on all. On most
processors, a oneDNN product of two or more rows also gives each row the same bits, whatever the number and the content
of the others; `keeps_bits` checks this for their number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.torch_internals import onednn_add_linear, onednn_linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x W' (+ bias)``. In float32 on a CPU the result has no gradient; see `frozen_linear`, `lora_linear`."""
    if not _uses_onednn(x, weight):
        return nn.functional.linear(x, weight, bias)
    return onednn_linear(x, weight, bias)


def keeps_bits(weight: Tensor) -> bool:
    """Return True if `linear` gives a row the same bits in products of 2 to 256 rows; checks nine sizes."""
    x = torch.randn(256, weight.shape[1], generator=torch.Generator().manual_seed(0))
    y = linear(x, weight)
    return all(torch.equal(linear(x[:num_rows], weight), y[:num_rows]) for num_rows in (2, 3, 7, 16, 33, 65, 129, 255))


def frozen_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Compute the output of a frozen layer, differentiable in ``x``."""
    if not _uses_onednn(x, layer.weight):
        return layer(x)
    y: Any = _FrozenLinear.apply(x, layer)
    return y


def lora_linear(x: Tensor, layer: nn.Linear, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Compute ``x W' (+ bias) + scale * x A' B'``, differentiable in ``x``, ``a`` and ``b``, in the dtype of ``x``.

    Args:
        a: ``(r, in)``.
        b: ``(out, r)``.
        scale: factor of the adapter's output.
    """
    if not _uses_onednn(x, layer.weight):
        y, down = layer(x), nn.functional.linear(x, a.to(x.dtype))
        return y.flatten(0, -2).addmm(down.flatten(0, -2), b.to(x.dtype).t(), alpha=scale).view(y.shape)
    y: Any = _LoraLinear.apply(x, a, b, layer, scale)
    return y


def _uses_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and not torch.is_autocast_enabled("cpu")
    )


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.save_for_backward(layer.weight)
        return onednn_linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return onednn_linear(grad_outputs[0], weight.t(), None), None


class _LoraLinear(torch.autograd.Function):
    """Layer and adapter as one node of the graph, which stores x and scale * x A', but not x A' B'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, layer: nn.Linear, scale: float) -> Tensor:
        down = onednn_linear(x, a, None).mul_(scale)
        ctx.save_for_backward(x, a, b, layer.weight, down)
        ctx.scale = scale
        return onednn_add_linear(onednn_linear(x, layer.weight, layer.bias), down, b)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, weight, down = ctx.saved_tensors
        grad_y_Ny = grad_outputs[0].flatten(0, -2)
        grad_down_Nr = onednn_linear(grad_y_Ny, b.t(), None).mul_(ctx.scale)
        grad_a = grad_b = grad_x = None
        if ctx.needs_input_grad[1]:
            grad_a = onednn_linear(grad_down_Nr.t(), x.flatten(0, -2).t(), None)
        if ctx.needs_input_grad[2]:  # as the transpose of down' grad_y, because a product with r columns is slow
            grad_b = onednn_linear(down.flatten(0, -2).t(), grad_y_Ny.t(), None).t()
        if ctx.needs_input_grad[0]:
            grad_x = onednn_linear(grad_y_Ny, weight.t(), None)
            grad_x = onednn_add_linear(grad_x, grad_down_Nr, a.t()).view(x.shape)
        return grad_x, grad_a, grad_b, None, None
