"""Which checkpoints a run keeps on the service: the newest ones, the best one, the final one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import tinker
from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks.storage import RunDirectory
from tasks.checkpoint import append_record, read_records, step_of
from tasks.metrics import MetricsLog
from tasks.options import retried_task
from tasks.service_errors import service_errors


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """Which checkpoints are kept.

    Attributes:
        last: how many of the newest; None is all.
        metric: the best by it is kept too; empty for none.
        mode: whether the best has the smallest or the largest value.
        ttl_seconds: how long the service keeps one that is neither the best nor the final one; None is for ever.
    """

    last: int | None
    metric: str
    mode: Literal["min", "max"]
    ttl_seconds: int | None


@retried_task(name="keep")
def keep_checkpoints(rest: tinker.RestClient, directory: RunDirectory, log: MetricsLog, policy: KeepPolicy) -> None:
    """Note the best checkpoint, and delete on the service those that are kept no longer; the record says which.

    Raises:
        ServiceError: the service could not be asked; what is left to do is done with the next checkpoint.
    """
    records = read_records(directory)
    # What a fork starts from is another run's.
    own = [each for each in records.checkpoints if not each.has("parent")]
    best = str(records.best.get("best", ""))
    if policy.metric and (found := find_best(own, log.values(policy.metric), policy.mode)):
        if found[0].state_path != best:
            _note_best(rest, directory, found, policy)
            if best not in records.dropped:
                _keep_for(rest, best, policy.ttl_seconds, policy)
        best = found[0].state_path or ""
    for record in own[policy.last :] if policy.last else ():
        if record.state_path != best and not record.final:
            path = record.state_path or ""
            with service_errors(f"delete the checkpoint {path}"), suppress(tinker.NotFoundError):
                rest.delete_checkpoint_from_tinker_path(path).result()
            append_record(directory, {"name": record.name, "dropped": path})


def find_best(
    records: Sequence[CheckpointRecord], values: Mapping[int, float], mode: Literal["min", "max"]
) -> tuple[CheckpointRecord, float] | None:
    """The checkpoint with the best value of a metric, the earliest of several, and that value.

    Args:
        values: the metric by step. What was measured at a step was measured on the weights that its checkpoint holds,
            so a checkpoint without a value at its own step takes no part.
    """
    measured = [(each, values[step_of(each)]) for each in records if math.isfinite(values.get(step_of(each), math.nan))]
    sign = 1 if mode == "min" else -1
    return min(measured, key=lambda pair: (sign * pair[1], step_of(pair[0])), default=None)


def _note_best(
    rest: tinker.RestClient, directory: RunDirectory, found: tuple[CheckpointRecord, float], policy: KeepPolicy
) -> None:
    """Record the best checkpoint, after the service was told to keep it; one that it no longer has is dropped."""
    record, value = found
    path = record.state_path or ""
    if _keep_for(rest, path, None, policy):
        line = {"name": "best", "best": path, "best_step": step_of(record), "metric": policy.metric, "value": value}
        append_record(directory, line)
    else:
        append_record(directory, {"name": record.name, "dropped": path})


def _keep_for(rest: tinker.RestClient, path: str, ttl_seconds: int | None, policy: KeepPolicy) -> bool:
    """Change how long the service keeps a checkpoint; false where it has it no longer."""
    if not path or policy.ttl_seconds is None:  # otherwise nothing expires
        return True
    with service_errors(f"change how long it keeps the checkpoint {path}"):
        try:
            rest.set_checkpoint_ttl_from_tinker_path(path, ttl_seconds).result()
        except tinker.NotFoundError:
            return False
    return True
