"""What every task of a training step shares."""

from __future__ import annotations

import logging
from functools import partial
from typing import TypeVar, cast

from prefect import State, task
from prefect.cache_policies import NO_CACHE
from prefect.utilities.annotations import opaque

from blocks.errors import ConfigError
from objectives.errors import ObjectiveError

T = TypeVar("T")

# One line per task run in the server's database and over the wire, to say what its state says; a failure still speaks.
logging.getLogger("prefect.task_runs").addFilter(lambda record: record.getMessage() != "Finished in state Completed()")

# Prefect's default cache key knows a function's source and inputs but not its closure, so terms made by one factory
# would share results; and a persisted tensor would be written to disk on every step.
step_task = partial(task, cache_policy=NO_CACHE, persist_result=False, log_prints=False)


def _may_pass(task: object, task_run: object, state: State[object]) -> bool:
    """What a user has to mend does not pass by waiting."""
    error = state.result(raise_on_failure=False)
    return not isinstance(error, ConfigError | ObjectiveError)


# Only for work that leaves no trace on the service: data, features, evaluation, reports.
retried_task = partial(
    step_task, retries=2, retry_delay_seconds=[1, 4], retry_jitter_factor=0.5, retry_condition_fn=_may_pass
)


def whole(value: T) -> T:
    """An argument of a task as it is: Prefect otherwise walks its every string, number and future several times."""
    return cast(T, opaque(value))
