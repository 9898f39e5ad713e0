"""One training step, as tasks.

batch ──> prepare (each term) ──────────────┐                   ahead, while the service works on the step before
forward (enqueued behind the last update) ──┴─> term (each) ──> linearize ──> forward_backward, optim_step
                                                                              └─ then the next step's forward
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, cast

import tinker
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.evaluate import Evaluation
from objectives.linearize import Linearized
from objectives.objective import Objective, Regularizer
from tasks.data import DataSource, load_batch
from tasks.forward import PendingOutput, enqueue_forward, forward_logprobs
from tasks.options import whole
from tasks.terms import compute_term, linearize_terms, prepare_term

# Terms stand between two requests, and a Prefect future costs as much again as the task run that it waits for.
_TERMS = ThreadPoolExecutor(max_workers=16, thread_name_prefix="term")


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step before its turn: its batch and the features of the terms that are due, under way."""

    step: int
    batch: PrefectFuture[Batch]
    terms: tuple[tuple[Regularizer, PrefectFuture[Any] | None], ...]


@dataclass(frozen=True, slots=True)
class Forward:
    """A batch whose forward pass is asked for."""

    batch: Batch
    pending: PendingOutput


def load_ahead(source: DataSource, objective: Objective, step: int) -> Ahead:
    """Start on everything of a step that needs no weights."""
    batch = load_batch.submit(source, step)
    loaded = cast(Batch, batch)  # Prefect gives a task the result of the future it is given
    due = [each for each in objective.regularizers if each.due_at(step)]
    terms = tuple((each, prepare_term.submit(each, whole(loaded)) if each.term.prepare else None) for each in due)
    return Ahead(step, batch, terms)


def enqueue_forward_ahead(client: tinker.TrainingClient, objective: Objective, ahead: Ahead) -> Forward | None:
    """Ask for the forward pass of a step; None where cross-entropy alone needs none before its backward."""
    if objective.base is None and not ahead.terms:
        return None
    batch = ahead.batch.result()
    return Forward(batch, enqueue_forward(client, batch))


def compute_linearized(objective: Objective, ahead: Ahead, forward: Forward, num_steps: int, first: bool) -> Linearized:
    """Evaluate every due term, concurrently, on the forward pass, and linearize the objective."""
    batch = forward.batch
    outputs = forward_logprobs(forward.pending, whole(batch))
    submitted = [(each, _submit(each, features, outputs, batch, first)) for each, features in ahead.terms]
    evaluated: list[tuple[Evaluation, float]] = []
    skipped: dict[str, float] = {}
    for regularizer, future in submitted:
        try:
            evaluated.append((future.result(), regularizer.weight_at(ahead.step, num_steps)))
        except ObjectiveError as error:
            if regularizer.on_error == "raise":
                raise
            get_run_logger().warning("Step %d goes on without a term. %s", ahead.step, error)
            skipped[f"term/{regularizer.name}/skipped"] = 1.0
    linearized = linearize_terms(objective, outputs, whole(batch), evaluated, first)
    return Linearized(linearized.loss_weights_DT, {**linearized.metrics, **skipped})


def _submit(
    regularizer: Regularizer, features: PrefectFuture[Any] | None, outputs: Outputs, batch: Batch, first: bool
) -> Future[Evaluation]:
    task = compute_term.with_options(retries=regularizer.retries) if regularizer.retries else compute_term

    def run() -> Evaluation:
        # Waited for here: Prefect would hand a task None for the result of one that failed.
        prepared = features.result() if features else None
        return task(regularizer, outputs, whole(batch), whole(prepared), first)

    return _TERMS.submit(copy_context().run, run)
