"""One training step, as tasks.

batch ──> prepare (each term) ──────────────┐                   ahead, while the service works on the step before
forward (enqueued behind the last update) ──┴─> term (each) ──> linearize ──> forward_backward, optim_step
                                                                              └─ then the next step's forward
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import tinker
from prefect import Task
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.evaluate import Evaluation
from objectives.execution.runner import TermRunner
from objectives.linearize import Linearized
from objectives.objective import Objective, Regularizer
from tasks.data import DataSource, load_batch
from tasks.forward import PendingOutput, enqueue_forward, forward_logprobs
from tasks.options import whole
from tasks.terms import compute_term, linearize_terms, prepare_term

P = ParamSpec("P")
R = TypeVar("R")

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
    terms = tuple((each, _prepare(objective.runner, each, loaded) if each.term.prepare else None) for each in due)
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
    runner = objective.runner
    submitted = [(each, _start(runner, each, features, outputs, batch, first)) for each, features in ahead.terms]
    evaluated: list[tuple[Evaluation, float]] = []
    skipped: dict[str, float] = {}
    for regularizer, result in submitted:
        weight = regularizer.weight_at(ahead.step, num_steps)
        try:
            evaluated.append((result(), weight))
        except ObjectiveError as error:
            if regularizer.on_error == "raise":
                raise
            get_run_logger().warning("Step %d goes on without a term. %s", ahead.step, error)
            skipped[f"term/{regularizer.name}/skipped"] = 1.0
            if stand_in := runner.stand_in(regularizer, outputs):
                evaluated.append((stand_in, weight))
    linearized = linearize_terms(objective, outputs, whole(batch), evaluated, ahead.step)
    smoothed = objective.watch.look(ahead.step, linearized.metrics)
    return Linearized(linearized.loss_weights_DT, {**linearized.metrics, **smoothed, **skipped})


def _prepare(runner: TermRunner, regularizer: Regularizer, batch: Batch) -> PrefectFuture[Any]:
    return _retried(prepare_term, regularizer).submit(runner, regularizer, whole(batch))


def _start(
    runner: TermRunner,
    regularizer: Regularizer,
    features: PrefectFuture[Any] | None,
    outputs: Outputs,
    batch: Batch,
    first: bool,
) -> Callable[[], Evaluation]:
    """Start on a term; what is returned waits for it, or under ``inline`` does it."""
    task = _retried(compute_term, regularizer)

    def run() -> Evaluation:
        # Waited for here: Prefect would hand a task None for the result of one that failed.
        prepared = features.result() if features else None
        return task(runner, regularizer, outputs, whole(batch), whole(prepared), first)

    return run if regularizer.execution == "inline" else _TERMS.submit(copy_context().run, run).result


def _retried(task: Task[P, R], regularizer: Regularizer) -> Task[P, R]:
    """A task that is retried as often as its term says, whatever the reason."""
    if not regularizer.retries:
        return task
    return task.with_options(retries=regularizer.retries, retry_condition_fn=lambda *_: True)
