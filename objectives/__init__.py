"""Losses and regularizers, combined into one linear loss that a Tinker service trains.

batch, outputs -> evaluate_base, evaluate_term (value, metrics, gradient with respect to the logprobs)
               -> linearize -> loss weights for cross_entropy, and the metrics of every term
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from objectives.config.aliases import RenamedModule, install

if TYPE_CHECKING:
    from objectives.batch import Batch, Outputs, pack, unpack
    from objectives.config.spec import BaseLossSpec, ObjectiveSpec, RegularizerSpec
    from objectives.errors import ObjectiveError
    from objectives.evaluate import Evaluation, evaluate_base, evaluate_term, prepare_features
    from objectives.gradients.linearize import Linearized, linearize
    from objectives.objective import Objective
    from objectives.one_pass.planner import OnePass
    from objectives.sdk.training_loop import (
        RegularizedOutput,
        forward_backward_regularized,
        forward_backward_regularized_async,
    )
    from objectives.term import Regularizer, Term, regularizer

__all__ = [
    "BaseLossSpec",
    "Batch",
    "Evaluation",
    "Linearized",
    "Objective",
    "ObjectiveError",
    "ObjectiveSpec",
    "OnePass",
    "Outputs",
    "RegularizedOutput",
    "Regularizer",
    "RegularizerSpec",
    "Term",
    "evaluate_base",
    "evaluate_term",
    "forward_backward_regularized",
    "forward_backward_regularized_async",
    "linearize",
    "pack",
    "prepare_features",
    "regularizer",
    "unpack",
]

_MODULES = {
    "objectives.batch": ("Batch", "Outputs", "pack", "unpack"),
    "objectives.errors": ("ObjectiveError",),
    "objectives.evaluate": ("Evaluation", "evaluate_base", "evaluate_term", "prepare_features"),
    "objectives.gradients.linearize": ("Linearized", "linearize"),
    "objectives.objective": ("Objective",),
    "objectives.one_pass.planner": ("OnePass",),
    "objectives.sdk.training_loop": (
        "RegularizedOutput",
        "forward_backward_regularized",
        "forward_backward_regularized_async",
    ),
    "objectives.config.spec": ("BaseLossSpec", "ObjectiveSpec", "RegularizerSpec"),
    "objectives.term": ("Regularizer", "Term", "regularizer"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

install()


class _Package(ModuleType):
    """Package whose exported functions keep their names when a renamed module of the same name is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULE_OF and isinstance(value, RenamedModule)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    """Import an exported name on first use, so that ``import objectives.config.aliases`` does not load torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value
