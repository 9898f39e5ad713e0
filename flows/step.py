"""One training step, as tasks.

batch ──> prepare (each term), reference ───┐                   ahead, while the service works on the step before
forward (enqueued behind the last update) ──┴─> term (each) ──> linearize ──> forward_backward, optim_step
                                                                              └─ then the next step's forward

Where the service has the objective as a loss, forward_backward and optim_step are sent at once, behind those of the
step before; terms and linearize follow their answer, for the metrics alone.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar, cast

import tinker
import torch
from prefect import Task
from prefect.logging import get_run_logger
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.evaluate import Evaluation
from objectives.execution.runner import TermRunner
from objectives.linearize import Linearized
from objectives.objective import Objective, Regularizer
from tasks.forward import PendingOutput, enqueue_forward, forward_logprobs
from tasks.options import Pending, call, submit, whole
from tasks.reference import Reference, load_reference
from tasks.terms import compute_term, linearize_terms, prepare_term

P = ParamSpec("P")
R = TypeVar("R")

# Terms stand between two requests, and a Prefect future costs as much again as the task run that it waits for.
_TERMS = ThreadPoolExecutor(max_workers=16, thread_name_prefix="term")


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step before its turn: its batch, the reference's logprobs, the features of the terms that are due, under way.

    `passes` is how often the service goes over the batch; `share` its part in its update, of which it may be one of
    several minibatches.
    """

    step: int
    passes: int
    share: float
    batch: Pending[Batch]
    reference: Pending[Tensor] | None
    terms: tuple[tuple[Regularizer, Pending[Any] | None], ...]

    def beside(self) -> Outputs:
        """What there is beside the current logprobs, which are 0 here."""
        batch = self.batch.result()
        reference_DT = self.reference.result() if self.reference else None
        return Outputs(torch.zeros(batch.target_tokens_DT.shape), reference_DT, batch.sampling_logprobs_DT)


@dataclass(frozen=True, slots=True)
class Forward:
    """A batch whose forward pass is asked for."""

    batch: Batch
    pending: PendingOutput


def num_passes(objective: Objective, step: int, looks_first: bool) -> int:
    """Of the service over the batch of a step: two where the update needs to know the logprobs before it."""
    needs_logprobs = objective.base is not None or any(each.due_at(step) for each in objective.regularizers)
    return 2 if needs_logprobs or looks_first else 1


def load_ahead(
    batch: Pending[Batch], objective: Objective, reference: Reference | None, step: int, passes: int, share: float
) -> Ahead:
    """Start on everything of a step that needs its batch and no answer to it."""
    loaded = cast(Batch, batch)  # a task is given the result of the future it is given
    due = [each for each in objective.regularizers if each.due_at(step)]
    terms = tuple((each, _prepare(objective.runner, each, loaded) if each.term.prepare else None) for each in due)
    asked = submit(load_reference, reference, whole(loaded)) if reference else None
    return Ahead(step, passes, share, batch, asked, terms)


def enqueue_forward_ahead(client: tinker.TrainingClient, ahead: Ahead) -> Forward:
    """Ask for the forward pass of a step."""
    batch = ahead.batch.result()
    return Forward(batch, enqueue_forward(client, batch))


def compute_linearized(objective: Objective, ahead: Ahead, forward: Forward, num_steps: int, first: bool) -> Linearized:
    """`measure` on the answer of the forward pass."""
    outputs = call(forward_logprobs, forward.pending, whole(forward.batch))
    return measure(objective, ahead, outputs, forward.batch, num_steps, first)


def measure(
    objective: Objective, ahead: Ahead, outputs: Outputs, batch: Batch, num_steps: int, first: bool
) -> Linearized:
    """Evaluate every due term, concurrently, and linearize the objective at these outputs.

    Of two passes it makes the loss weights of the second; of one, which has trained by then, the metrics of the terms.
    """
    runner = objective.runner
    outputs = replace(ahead.beside(), logprobs_DT=outputs.logprobs_DT)
    submitted = [(each, _start(runner, each, features, outputs, batch, first)) for each, features in ahead.terms]
    evaluated: list[tuple[Evaluation, float]] = []
    skipped: dict[str, float] = {}
    for regularizer, result in submitted:
        evaluation, error = runner.settle(regularizer, outputs, result)
        if error:
            get_run_logger().warning("Step %d goes on without a term. %s", ahead.step, error)
            skipped[f"term/{regularizer.name}/skipped"] = 1.0
        if evaluation:
            evaluated.append((evaluation, regularizer.weight_at(ahead.step, num_steps, ahead.share)))
    linearized = call(linearize_terms, objective, outputs, whole(batch), evaluated, ahead.step, ahead.share)
    # As the config has them, whatever the share of a minibatch.
    whole_weights = {f"term/{each.name}/weight": each.weight_at(ahead.step, num_steps) for each, _ in ahead.terms}
    metrics = {key: whole_weights.get(key, figure) for key, figure in linearized.metrics.items()}
    return replace(linearized, metrics=metrics | skipped)


def _prepare(runner: TermRunner, regularizer: Regularizer, batch: Batch) -> Pending[Any]:
    return submit(_retried(prepare_term, regularizer), runner, regularizer, whole(batch))


def _start(
    runner: TermRunner,
    regularizer: Regularizer,
    features: Pending[Any] | None,
    outputs: Outputs,
    batch: Batch,
    first: bool,
) -> Callable[[], Evaluation]:
    """Start on a term; what is returned waits for it, or under ``inline`` does it."""
    task = _retried(compute_term, regularizer)

    def run() -> Evaluation:
        # Waited for here: Prefect would hand a task None for the result of one that failed.
        prepared = features.result() if features else None
        return call(task, runner, regularizer, outputs, whole(batch), whole(prepared), first)

    return run if regularizer.execution == "inline" else _TERMS.submit(copy_context().run, run).result


def _retried(task: Task[P, R], regularizer: Regularizer) -> Task[P, R]:
    """A task that is retried as often as its term says, whatever the reason."""
    if not regularizer.retries:
        return task
    return task.with_options(retries=regularizer.retries, retry_condition_fn=lambda *_: True)
