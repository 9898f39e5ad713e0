"""Internals of torch that the engine uses. Only this module imports them."""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
