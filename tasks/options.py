"""What every task of a training step shares."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from prefect import State, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.utilities.annotations import opaque

from blocks.errors import ConfigError, NotFiniteError
from objectives.errors import ObjectiveError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Pending = PrefectFuture[T] | Future[T]

_FOLDED = ContextVar("folded", default=False)
# Most of its threads wait, for the service or for each other: with too few they would wait for ever.
_AHEAD = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="ahead")

# One line per task run in the server's database and over the wire, to say what its state says; a failure still speaks.
logging.getLogger("prefect.task_runs").addFilter(lambda record: record.getMessage() != "Finished in state Completed()")

# Prefect's default cache key knows a function's source and inputs but not its closure, so terms made by one factory
# would share results; and a persisted tensor would be written to disk on every step.
step_task = partial(task, cache_policy=NO_CACHE, persist_result=False, log_prints=False)


def _may_pass(task: object, task_run: object, state: State[object]) -> bool:
    """What a user has to mend, or a guard to treat, does not pass by waiting."""
    # Of an async task it would be a coroutine, which nobody awaits.
    error = state.result(raise_on_failure=False, _sync=True)  # pyright: ignore[reportCallIssue]
    return not isinstance(error, ConfigError | ObjectiveError | NotFiniteError)


# Only for work that leaves no trace on the service: data, features, evaluation, reports.
retried_task = partial(
    step_task, retries=2, retry_delay_seconds=[1, 4], retry_jitter_factor=0.5, retry_condition_fn=_may_pass
)


def whole(value: T) -> T:
    """An argument of a task as it is: Prefect otherwise walks its every string, number and future several times."""
    return value if _FOLDED.get() else cast(T, opaque(value))


@contextmanager
def folded() -> Iterator[None]:
    """What `call` and `submit` run in this block has no task run of its own: one that stands for it is under way."""
    token = _FOLDED.set(True)
    try:
        yield
    finally:
        _FOLDED.reset(token)


def call(task: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a task; a folded one that fails and may be tried again gets a task run, to be tried again in."""
    if not _FOLDED.get():
        return task(*args, **kwargs)
    try:
        return task.fn(*args, **kwargs)
    except Exception:
        if not task.retries:
            raise
        return task(*args, **kwargs)


def submit(task: Task[..., R], *args: Any) -> Pending[R]:
    """Start on a task that is waited for later; an argument may be what another `submit` returned."""
    if not _FOLDED.get() and not any(isinstance(_bare(each), Future) for each in args):
        return task.submit(*args)

    def run() -> R:
        return call(task, *(whole(_bare(each).result()) if isinstance(_bare(each), Future) else each for each in args))

    return _AHEAD.submit(copy_context().run, run)


def _bare(argument: Any) -> Any:
    return argument.unwrap() if isinstance(argument, opaque) else argument
