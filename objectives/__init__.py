"""Losses, regularizers, and what turns them into the one linear loss that a Tinker service trains.

batch, outputs -> evaluate_base, evaluate_term (each: value, metrics, gradient by the logprobs)
               -> linearize -> loss weights for cross_entropy, and the metrics of every term
"""

from objectives.batch import Batch, Outputs, pack, unpack
from objectives.errors import ObjectiveError
from objectives.evaluate import Evaluation, evaluate_base, evaluate_term, prepare_features
from objectives.linearize import Linearized, linearize
from objectives.objective import Objective, Regularizer
from objectives.one_pass import OnePass
from objectives.sdk_loop import forward_backward_regularized
from objectives.spec import BaseLossSpec, ObjectiveSpec, RegularizerSpec
from objectives.term import Term, regularizer

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
    "Regularizer",
    "RegularizerSpec",
    "Term",
    "evaluate_base",
    "evaluate_term",
    "forward_backward_regularized",
    "linearize",
    "pack",
    "prepare_features",
    "regularizer",
    "unpack",
]
