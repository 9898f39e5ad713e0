"""Internals of torch that the engine uses. Only this module imports them."""

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["TorchDispatchMode", "flop_registry"]
