"""Terms of an objective as task runs, and the executor that calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from typing import ParamSpec, TypeVar, cast

from prefect import Task
from prefect.logging import get_run_logger

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.evaluate import Evaluation
from objectives.execution.runner import TermRunner
from objectives.execution.term_loop import Features, linearize_terms
from objectives.gradients.linearize import Linearized, WeightedTerm
from objectives.objective import Objective
from objectives.scale import Scale
from objectives.term import Regularizer
from tasks.common.task import Pending, call, opaque_argument, retried_task, step_task, submit

P = ParamSpec("P")
R = TypeVar("R")

_MAX_CONCURRENT_TERMS = 16


@retried_task(name="prepare", task_run_name="prepare-{regularizer.name}")
def prepare_term(runner: TermRunner, regularizer: Regularizer, batch: Batch) -> object:
    """Compute the features of a term from the data alone, while the service is busy with an earlier step."""
    return runner.prepare(regularizer, batch)


@step_task(name="term", task_run_name="term-{regularizer.name}")
def compute_term(
    runner: TermRunner, regularizer: Regularizer, outputs: Outputs, batch: Batch, features: object, first_step: bool
) -> Evaluation:
    """Compute the value of one term and its gradient with respect to the logprobs."""
    return runner.evaluate(regularizer, outputs, replace(batch, features=features), first_step)


@retried_task(name="held_out", task_run_name="held-out-{regularizer.name}")
def measure_term(
    runner: TermRunner, regularizer: Regularizer, inputs: Sequence[tuple[Outputs, Batch]]
) -> list[Evaluation]:
    """Compute the values of one term on held-out batches."""
    # Not as the term's last value, which stands in for a failed evaluation on training data.
    apart = replace(regularizer, on_error="raise")
    return [
        runner.evaluate(apart, outputs, replace(batch, features=runner.prepare(apart, batch)), False)
        for outputs, batch in inputs
    ]


linearize_task = step_task(name="linearize")(linearize_terms)


class TaskTermExecutor:
    """Term executor that runs each call as a Prefect task, on threads that it owns.

    Terms stand on the critical path between two requests. A thread is cheaper there than a Prefect future, which costs
    as much again as the task run that it waits for. A thread waits only for features, which another pool computes.
    """

    def __init__(self, runner: TermRunner) -> None:
        self._runner = runner
        self._threads = ThreadPoolExecutor(_MAX_CONCURRENT_TERMS, thread_name_prefix="term")

    def prepare(self, regularizer: Regularizer, batch: Pending[Batch]) -> Features:
        loaded = cast(Batch, batch)  # a task receives the result of a future that is passed to it
        return submit(
            _with_retries(prepare_term, regularizer), self._runner, regularizer, opaque_argument(loaded)
        ).result

    def evaluate(
        self, regularizer: Regularizer, features: Features | None, outputs: Outputs, batch: Batch, first_step: bool
    ) -> Callable[[], Evaluation]:
        task = _with_retries(compute_term, regularizer)

        def run() -> Evaluation:
            # Waited for here: Prefect passes None for the result of a task that failed.
            prepared = features() if features else None
            return call(
                task, self._runner, regularizer, outputs, opaque_argument(batch), opaque_argument(prepared), first_step
            )

        if regularizer.execution == "inline":
            return run
        return self._threads.submit(copy_context().run, run).result

    def measure(
        self, regularizer: Regularizer, inputs: Sequence[tuple[Outputs, Batch]]
    ) -> Callable[[], list[Evaluation]]:
        """Start measuring a term on held-out batches; the returned function waits for its evaluations."""
        task = _with_retries(measure_term, regularizer)

        def run() -> list[Evaluation]:
            return call(task, self._runner, regularizer, opaque_argument(inputs))

        return self._threads.submit(copy_context().run, run).result

    def linearize(
        self,
        objective: Objective,
        outputs: Outputs,
        batch: Batch,
        evaluated: Sequence[WeightedTerm],
        step: int,
        scale: Scale,
    ) -> Linearized:
        return call(linearize_task, objective, outputs, opaque_argument(batch), evaluated, step, scale)

    def report_skipped(self, step: int, regularizer: Regularizer, error: ObjectiveError) -> None:
        get_run_logger().warning("Step %d continues without a term. %s", step, error)

    def close(self) -> None:
        """Drop the calls that have not started."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _with_retries(task: Task[P, R], regularizer: Regularizer) -> Task[P, R]:
    """Return the task with the retries of the term, which apply to every error."""
    if not regularizer.retries:
        return task
    return task.with_options(retries=regularizer.retries, retry_condition_fn=lambda *_: True)
