"""The terms of an objective as task runs: features ahead of the service, values and gradients beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from objectives.batch import Batch, Outputs
from objectives.evaluate import Evaluation, evaluate_base
from objectives.execution.runner import TermRunner
from objectives.linearize import Linearized, linearize
from objectives.objective import Objective, Regularizer
from tasks.options import retried_task, step_task


@retried_task(name="prepare", task_run_name="prepare-{regularizer.name}")
def prepare_term(runner: TermRunner, regularizer: Regularizer, batch: Batch) -> Any:
    """Compute what a term needs of the data alone, while the service is still busy with the step before."""
    return runner.prepare(regularizer, batch)


@step_task(name="term", task_run_name="term-{regularizer.name}")
def compute_term(
    runner: TermRunner, regularizer: Regularizer, outputs: Outputs, batch: Batch, features: Any, first: bool
) -> Evaluation:
    """One term's value and its gradient with respect to the logprobs."""
    return runner.evaluate(regularizer, outputs, replace(batch, features=features), first)


@step_task(name="linearize")
def linearize_terms(
    objective: Objective,
    outputs: Outputs,
    batch: Batch,
    terms: Sequence[tuple[Evaluation, float]],
    step: int,
    share: float = 1.0,
) -> Linearized:
    """Evaluate the base loss and sum all weighted gradients into the loss weights that the service takes.

    Args:
        share: of the batch in its update.
    """
    base_weight = objective.base.weight_at(step, 1, share) if objective.base else 1.0
    base = evaluate_base(objective, outputs, batch, step == 0)
    return linearize(base, terms, objective.balance, step, base_weight)
