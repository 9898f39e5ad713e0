"""Terms of an objective as task runs, and the executor that submits them to the task runner of the run."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, cast

from prefect import Task
from prefect.client.orchestration import get_client
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.states import Crashed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from blocks.errors import ConfigError, first_line
from objectives.batch import Batch, Outputs
from objectives.errors import ExecutionError, ObjectiveError
from objectives.evaluate import Evaluation
from objectives.execution.process import importable
from objectives.execution.remote import encode_call, run_call
from objectives.execution.runner import Call, TermRunner
from objectives.execution.term_loop import Features, linearize_terms, once
from objectives.gradients.linearize import Linearized, WeightedTerm
from objectives.objective import Objective
from objectives.term import Regularizer
from objectives.term_weights.scale import Scale
from tasks.common.service_errors import TRANSIENT_ERRORS
from tasks.common.task import Pending, call, opaque_argument, retried_task, step_task, submit

P = ParamSpec("P")
R = TypeVar("R")

_MAX_WAITING_CALLS = 32


@retried_task(name="prepare", task_run_name="prepare-{regularizer.name}")
def prepare_term(runner: TermRunner, regularizer: Regularizer, batch: Batch) -> object:
    """Compute the features of a term from the data alone, while the service is busy with an earlier step."""
    return runner.prepare(regularizer, batch)


@step_task(name="term", task_run_name="term-{regularizer.name}")
def compute_term(
    runner: TermRunner,
    regularizer: Regularizer,
    outputs: Outputs,
    batch: Batch,
    features: Features | None,
    first_step: bool,
) -> Evaluation:
    """Compute the value of one term and its gradient with respect to the logprobs."""
    prepared = replace(batch, features=features()) if features else batch
    return runner.evaluate(regularizer, outputs, prepared, first_step)


@retried_task(name="held_out", task_run_name="held-out-{regularizer.name}")
def measure_term(
    runner: TermRunner, regularizer: Regularizer, inputs: Sequence[tuple[Outputs, Batch]], run: Call | None = None
) -> list[Evaluation]:
    """Compute the values of one term on held-out batches."""
    # With on_error 'last', the runner would keep held-out values as the term's last values on training data.
    apart = replace(regularizer, on_error="raise")
    return [
        runner.evaluate(apart, outputs, replace(batch, features=runner.prepare(apart, batch, run)), False, run)
        for outputs, batch in inputs
    ]


def run_on_worker(term: str, encoded: bytes) -> bytes:
    """Run an encoded call on a worker, which has neither the runner nor the cache of the run's process."""
    return run_call(encoded)


prepare_on_worker = retried_task(name="prepare", task_run_name="prepare-{term}")(run_on_worker)
compute_on_worker = step_task(name="term", task_run_name="term-{term}")(run_on_worker)
measure_on_worker = retried_task(name="held_out", task_run_name="held-out-{term}")(run_on_worker)

linearize_task = step_task(name="linearize")(linearize_terms)


class TaskTermExecutor:
    """Term executor that submits each call as a Prefect task to the task runner of the run.

    A task runner with workers outside this process receives the terms whose execution is ``task_runner``. Their
    features are cached here, and threads of this executor wait for the workers. All other terms run on threads of this
    process.
    """

    def __init__(self, runner: TermRunner, task_runner: TaskRunner[Any], regularizers: Sequence[Regularizer]) -> None:
        """Check that the workers can import the terms.

        Raises:
            ObjectiveError: a worker cannot import a term.
        """
        self._runner = runner
        self._workers = None if isinstance(task_runner, ThreadPoolTaskRunner) else task_runner
        # Evaluations wait for features, so the two have separate threads.
        self._preparing = ThreadPoolExecutor(_MAX_WAITING_CALLS, thread_name_prefix="prepare")
        self._evaluating = ThreadPoolExecutor(_MAX_WAITING_CALLS, thread_name_prefix="term")
        for regularizer in filter(self._is_sent, regularizers):
            try:
                importable(regularizer.term)
            except ExecutionError as error:
                raise ObjectiveError(
                    f"Term {regularizer.name!r} cannot run on a worker of the task runner: {error}, or set its "
                    "execution to 'thread'."
                ) from error

    def prepare(self, regularizer: Regularizer, batch: Pending[Batch]) -> Features:
        if self._is_sent(regularizer):
            run = self._sent(prepare_on_worker, regularizer)
            return self._start(self._preparing, lambda: self._runner.prepare(regularizer, batch.result(), run))
        task = _with_retries(prepare_term, regularizer)
        if regularizer.execution == "inline":
            return once(lambda: call(task, self._runner, regularizer, opaque_argument(batch.result())))
        loaded = cast(Batch, batch)  # a task receives the result of a future that is passed to it
        return submit(task, self._runner, regularizer, opaque_argument(loaded)).result

    def evaluate(
        self, regularizer: Regularizer, features: Features | None, outputs: Outputs, batch: Batch, first_step: bool
    ) -> Callable[[], Evaluation]:
        if self._is_sent(regularizer):
            run = self._sent(compute_on_worker, regularizer)

            def evaluate() -> Evaluation:
                prepared = replace(batch, features=features()) if features else batch
                return self._runner.evaluate(regularizer, outputs, prepared, first_step, run)

            return self._start(self._evaluating, evaluate)
        task = _with_retries(compute_term, regularizer)
        arguments = (outputs, opaque_argument(batch), opaque_argument(features), first_step)
        if regularizer.execution == "inline":

            def run_inline() -> Evaluation:
                if features:
                    features()  # on this thread and before the term's own task run
                return call(task, self._runner, regularizer, *arguments)

            return run_inline
        return submit(task, self._runner, regularizer, *arguments).result

    def measure(
        self, regularizer: Regularizer, inputs: Sequence[tuple[Outputs, Batch]]
    ) -> Callable[[], list[Evaluation]]:
        """Start measuring a term on held-out batches; the returned function waits for its evaluations."""
        if self._is_sent(regularizer):
            run = self._sent(measure_on_worker, regularizer)
            return self._start(self._evaluating, lambda: measure_term.fn(self._runner, regularizer, inputs, run))
        task = _with_retries(measure_term, regularizer)
        if regularizer.execution == "inline":
            return lambda: call(task, self._runner, regularizer, opaque_argument(inputs))
        return submit(task, self._runner, regularizer, opaque_argument(inputs)).result

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
        for threads in (self._preparing, self._evaluating):
            threads.shutdown(wait=False, cancel_futures=True)

    def _is_sent(self, regularizer: Regularizer) -> bool:
        return self._workers is not None and regularizer.execution == "task_runner"

    def _sent(self, task: Task[..., bytes], regularizer: Regularizer) -> Call:
        """Return a function that runs a call of the term as a task on a worker of the task runner."""
        task, workers = _with_retries(task, regularizer), self._workers
        assert workers is not None

        def run(doing: str, regularizer: Regularizer, *arguments: object) -> Any:
            encoded = encode_call(doing, regularizer, arguments)
            try:
                future = workers.submit(task, {"term": regularizer.name, "encoded": encoded})
                with _lost_worker_reported(future, str(task.task_run_name).format(term=regularizer.name)):
                    return pickle.loads(future.result())
            except ObjectiveError:
                raise
            except BrokenExecutor as error:
                raise ConfigError(
                    f"A process of the task runner ended while terms, such as {regularizer.name!r}, ran or waited "
                    "there, and Prefect's process pool does not recover: set the execution of a term that crashes to "
                    "'process', or call the flow below `if __name__ == \"__main__\":`, and start the run again."
                ) from error
            except (Exception, CancelledError) as error:
                raise ExecutionError(
                    f"its worker of the task runner did not finish it ({first_line(error)}); check for a crash in its "
                    "dependencies, too little memory, or a package missing on the workers"
                ) from error

        return run

    def _start(self, threads: ThreadPoolExecutor, function: Callable[[], R]) -> Callable[[], R]:
        future: Future[R] = threads.submit(copy_context().run, function)
        return future.result


@contextmanager
def _lost_worker_reported(future: PrefectFuture[Any], name: str) -> Iterator[None]:
    """Set a task run to Crashed if its worker ended without a final state; Prefect would show it as Running forever.

    Args:
        name: name of the task run, which the worker may not have sent.
    """
    try:
        yield
    except (Exception, CancelledError) as error:
        with suppress(*TRANSIENT_ERRORS):
            if not future.state.is_final():
                state = Crashed(message=f"The worker did not finish it: {first_line(error)}")
                with get_client(sync_client=True) as client:
                    client.set_task_run_name(future.task_run_id, name)
                    client.set_task_run_state(future.task_run_id, state, force=True)
        raise


def _with_retries(task: Task[P, R], regularizer: Regularizer) -> Task[P, R]:
    """Return the task with the retries of the term, which apply to every error."""
    if not regularizer.retries:
        return task
    return task.with_options(retries=regularizer.retries, retry_condition_fn=lambda *_: True)
