"""Internals of torch that the engine uses. Only this module imports them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["TorchDispatchMode", "flop_registry", "onednn_add_linear", "onednn_linear"]


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute ``x W' (+ bias)`` with oneDNN, without autograd; the tensors are float32 on a CPU, of any strides."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def onednn_add_linear(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute ``y + x W'`` like `onednn_linear`, in one pass over ``y``."""
    return torch.ops.mkldnn._linear_pointwise.binary(x, y, weight, None, "add")
