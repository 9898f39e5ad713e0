"""What every task of a training step shares."""

from __future__ import annotations

import logging
from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE

# One line per task run in the server's database and over the wire, to say what its state says; a failure still speaks.
logging.getLogger("prefect.task_runs").addFilter(lambda record: record.getMessage() != "Finished in state Completed()")

# Prefect's default cache key knows a function's source and inputs but not its closure, so terms made by one factory
# would share results; and a persisted tensor would be written to disk on every step.
step_task = partial(task, cache_policy=NO_CACHE, persist_result=False, log_prints=False)

# Only for work that leaves no trace on the service: data, features, terms, evaluation, metrics, reports.
retried_task = partial(step_task, retries=2, retry_delay_seconds=[1, 4], retry_jitter_factor=0.5)
