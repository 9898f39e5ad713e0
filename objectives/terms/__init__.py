"""The built-in regularizers, one file each; importing this registers them."""

from objectives.terms import (
    confidence,
    consistency,
    divergence,
    entropy,
    fairness,
    kl,
    length,
    logic,
    magnitude,
    margin,
    norms,
    orthogonality,
    repetition,
    sparsity,
    topology,
    unlikely,
)

__all__ = [
    "confidence",
    "consistency",
    "divergence",
    "entropy",
    "fairness",
    "kl",
    "length",
    "logic",
    "magnitude",
    "margin",
    "norms",
    "orthogonality",
    "repetition",
    "sparsity",
    "topology",
    "unlikely",
]
