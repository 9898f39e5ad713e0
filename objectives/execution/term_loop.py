"""One step of an objective's terms: prepare, evaluate, linearize.

Flows and `objectives.sdk.training_loop` share these functions and differ in the executor: flows run the terms as
Prefect tasks, and the training loop as plain functions. Both run them concurrently, on threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.evaluate import Evaluation, evaluate_base
from objectives.gradients.linearize import Linearized, WeightedTerm, linearize
from objectives.objective import Objective
from objectives.term import BASE, Regularizer
from objectives.term_weights.scale import Scale, candidate_scale

BatchT_contra = TypeVar("BatchT_contra", contravariant=True)
BatchT = TypeVar("BatchT")
T = TypeVar("T")

Features = Callable[[], object]
"""Function that waits for the features of a term and raises `ObjectiveError` if preparing failed."""


class TermExecutor(Protocol[BatchT_contra]):
    """Executor of the calls of a step's terms. ``BatchT_contra`` is a batch or the future of a batch."""

    def prepare(self, regularizer: Regularizer, batch: BatchT_contra, /) -> Features:
        """Start preparing a term's features."""
        ...

    def evaluate(
        self, regularizer: Regularizer, features: Features | None, outputs: Outputs, batch: Batch, first_step: bool, /
    ) -> Callable[[], Evaluation]:
        """Start evaluating a term; the returned function waits for the evaluation."""
        ...

    def linearize(
        self,
        objective: Objective,
        outputs: Outputs,
        batch: Batch,
        evaluated: Sequence[WeightedTerm],
        step: int,
        scale: Scale,
        /,
    ) -> Linearized:
        """Call `linearize_terms`."""
        ...

    def report_skipped(self, step: int, regularizer: Regularizer, error: ObjectiveError, /) -> None:
        """Report that a step continues without a term, because of its error."""
        ...


@dataclass(frozen=True, slots=True)
class StepPosition:
    """Position of a batch in its run, which determines the weights of terms.

    Attributes:
        step: step of the run, from 0.
        num_steps: steps of the run.
        share: share of the batch in its update: one over the number of minibatches.
        on_candidates: True for sampled candidates, on which only scored terms train.
    """

    step: int
    num_steps: int
    share: float = 1.0
    on_candidates: bool = False


@dataclass(frozen=True, slots=True)
class DueTerm:
    """Term that is due at a step, with its features; ``None`` for a term without ``prepare``."""

    regularizer: Regularizer
    features: Features | None


def prepare_terms(
    objective: Objective, batch: BatchT, position: StepPosition, executor: TermExecutor[BatchT]
) -> tuple[DueTerm, ...]:
    """Start preparing every term that is due at a step."""
    return tuple(
        DueTerm(regularizer, executor.prepare(regularizer, batch) if regularizer.term.prepare else None)
        for regularizer in objective.due(position.step, on_candidates=position.on_candidates)
    )


def evaluate_terms(  # noqa: PLR0913 - the objective, its inputs and where they stand in the run
    objective: Objective,
    terms: Sequence[DueTerm],
    outputs: Outputs,
    batch: Batch,
    executor: TermExecutor[BatchT],
    position: StepPosition,
    supervised: Batch | None = None,
) -> Linearized:
    """Evaluate the due terms with the executor and linearize the objective at these outputs.

    At step 0, a differentiable term without a gradient is rejected.

    Args:
        supervised: the batch whose prompts the candidates were sampled for, if this is a batch of candidates.

    Raises:
        ObjectiveError: a term failed, and its ``on_error`` is ``raise``; the base loss failed; or `linearize` failed.
    """
    pending = [
        (term.regularizer, executor.evaluate(term.regularizer, term.features, outputs, batch, position.step == 0))
        for term in terms
    ]
    scale = objective.scale(supervised or batch, position.share)
    if supervised is not None:
        scale = candidate_scale(scale)
    evaluated: list[WeightedTerm] = []
    skipped: dict[str, float] = {}
    for regularizer, wait in pending:
        evaluation, error = objective.runner.settle(regularizer, outputs, wait)
        if error:
            executor.report_skipped(position.step, regularizer, error)
            skipped[f"term/{regularizer.name}/skipped"] = 1.0
        if evaluation:
            objective.set_gain_unit(regularizer, batch, supervised)
            weight = objective.weight_at(regularizer, position.step, position.num_steps)
            is_balanced = regularizer.target is None
            factor = scale.of(regularizer, batch)
            evaluated.append(WeightedTerm(evaluation, weight, factor, is_balanced, regularizer.adds_up))
    linearized = executor.linearize(objective, outputs, batch, evaluated, position.step, scale)
    return replace(linearized, metrics={**linearized.metrics, **skipped})


def linearize_terms(
    objective: Objective,
    outputs: Outputs,
    batch: Batch,
    evaluated: Sequence[WeightedTerm],
    step: int,
    scale: Scale,
) -> Linearized:
    """Evaluate the base loss and add up all weighted gradients as the loss weights of the service.

    A scale without a base, as of candidates, has no base loss.
    """
    if scale.base:
        base = evaluate_base(objective.base, outputs, batch, step == 0)
    else:
        base = Evaluation(BASE, 0.0, torch.zeros_like(outputs.logprobs_DT))
    return linearize(base, evaluated, objective.balance, step, scale)


def once(call: Callable[[], T]) -> Callable[[], T]:
    """Return a function that makes a call when first called, and has the same outcome ever after."""
    outcome: Future[T] = Future()

    def run() -> T:
        if not outcome.done():
            try:
                outcome.set_result(call())
            except Exception as error:  # noqa: BLE001 - raised by result()
                outcome.set_exception(error)
        return outcome.result()

    return run
