"""Built-in regularizers, one module for each kind; importing this package registers them."""

from objectives.terms.group import consistency, fairness, margin, orthogonality, preferences
from objectives.terms.text import knowledge, length, logic, repetition, simulation, topology
from objectives.terms.token import confidence, divergence, entropy, kl, magnitude, norms, unlikely

__all__ = [
    "confidence",
    "consistency",
    "divergence",
    "entropy",
    "fairness",
    "kl",
    "knowledge",
    "length",
    "logic",
    "magnitude",
    "margin",
    "norms",
    "orthogonality",
    "preferences",
    "repetition",
    "simulation",
    "topology",
    "unlikely",
]
