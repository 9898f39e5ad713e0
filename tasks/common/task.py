"""Options of the tasks of a training step, and calls of tasks with or without task runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from prefect import State, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.states import Failed
from prefect.tasks import MaterializingTask
from prefect.utilities.annotations import opaque

from blocks.errors import ConfigError, NotFiniteError
from blocks.terminal import escape_log_record
from objectives.errors import ObjectiveError
from tasks.common.event_loop import current_workers
from tasks.common.internals.prefect import state_error

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Pending = PrefectFuture[T] | Future[T]

_INLINE = ContextVar("inline", default=False)
# The state of a task run already shows that it completed, so its log line is dropped; failures are still logged.
logging.getLogger("prefect.task_runs").addFilter(lambda record: record.getMessage() != "Finished in state Completed()")
for name in ("prefect.task_runs", "prefect.flow_runs"):
    logging.getLogger(name).addFilter(escape_log_record)

# Prefect's default cache key covers a function's source and inputs but not its closure, so terms from one factory would
# share results. Persistence would write every tensor to disk.
step_task = partial(task, cache_policy=NO_CACHE, persist_result=False, log_prints=False)


def _is_retryable(task: object, task_run: object, state: State[object]) -> bool:
    """Return False for errors that the user must fix or a guard handles."""
    return not isinstance(state_error(state), ConfigError | ObjectiveError | NotFiniteError)


# Only for work that may run again after a failure: data, features, evaluation, reports, and requests whose repetition
# has no further effect, such as promoting or deleting checkpoints.
retried_task = partial(
    step_task, retries=2, retry_delay_seconds=[1, 4], retry_jitter_factor=0.5, retry_condition_fn=_is_retryable
)


def opaque_argument(value: T) -> T:
    """Wrap an argument of a task, so that Prefect does not traverse its contents."""
    return value if _INLINE.get() else cast(T, opaque(value))


@contextmanager
def inline_tasks() -> Iterator[None]:
    """Run the tasks of `call` and `submit` without task runs in this block, which is part of an enclosing task run."""
    token = _INLINE.set(True)
    try:
        yield
    finally:
        _INLINE.reset(token)


def call(task: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a task. If an inline task fails with an error that may be retried, a task run calls it again.

    That task run handles further retries. A task that materializes an asset always has a task run, because the task
    run reports the asset.
    """
    if not _INLINE.get() or isinstance(task, MaterializingTask):
        return task(*args, **kwargs)
    try:
        return task.fn(*args, **kwargs)
    except Exception as error:
        condition = task.retry_condition_fn
        if not task.retries or (condition and not condition(task, None, Failed(data=error))):  # pyright: ignore[reportArgumentType]
            raise
        return task(*args, **kwargs)


def submit(task: Task[..., R], *args: Any) -> Pending[R]:
    """Start a task whose result is needed later; an argument may be the result of another `submit`.

    An inline task, or a task with an argument that runs on the workers of the run, also runs on these workers, once its
    arguments are ready. Prefect's task runner runs all other tasks.
    """
    after = tuple(argument for argument in map(_unwrap, args) if isinstance(argument, Future))
    if not _INLINE.get() and not after:
        return task.submit(*args)

    def run() -> R:
        ready = (
            opaque_argument(_unwrap(argument).result()) if isinstance(_unwrap(argument), Future) else argument
            for argument in args
        )
        return call(task, *ready)

    return current_workers().submit(run, after)


def _unwrap(argument: Any) -> Any:
    return argument.unwrap() if isinstance(argument, opaque) else argument
