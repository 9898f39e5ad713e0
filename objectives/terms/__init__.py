"""The built-in regularizers, one file each; importing this registers them."""

from objectives.terms import confidence, logic, sparsity, topology

__all__ = ["confidence", "logic", "sparsity", "topology"]
