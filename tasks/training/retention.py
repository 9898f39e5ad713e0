"""Retention of checkpoints on the service: a run keeps the newest, the best and the final ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import tinker
from tinker_cookbook.checkpoint_utils import CHECKPOINTS_BASE_NAME, CheckpointRecord

from blocks.storage import RunDirectory
from tasks.common.jsonl import read_jsonl
from tasks.common.service_errors import service_errors
from tasks.common.task import retried_task
from tasks.training.checkpoints import append_record, parse_record, read_records, step_of
from tasks.training.tracking.logged_models import MODEL_ID, delete_model
from tasks.training.tracking.metrics import MetricsLog


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """Retention policy.

    Attributes:
        last: number of newest checkpoints to keep, counted separately for checkpoints with a state and for checkpoints
            with sampler weights alone; None keeps all.
        metric: MLflow metric that selects the best checkpoint, which is also kept; empty to select none.
        mode: `min` if smaller values of the metric are better, `max` otherwise.
        ttl_seconds: lifetime of checkpoints that are neither best nor final; None means forever.
    """

    last: int | None
    metric: str
    mode: Literal["min", "max"]
    ttl_seconds: int | None


@retried_task(name="keep")
def keep_checkpoints(
    rest: tinker.RestClient, directory: RunDirectory, log: MetricsLog, policy: KeepPolicy
) -> CheckpointRecord | None:
    """Record the best checkpoint and return it; delete old ones with their logged models, and record the deletions.

    Returns None without a metric in the policy, or if no checkpoint has a value of it.

    Raises:
        ServiceError, MlflowException: the service or MLflow failed; the next call completes the work.
    """
    records = read_records(directory)
    # The checkpoint that a fork starts from belongs to another run.
    own = [record for record in records.checkpoints if not record.has("parent")]
    recorded = str(records.best.get("best", ""))
    values = log.values(policy.metric) if policy.metric else {}
    candidates = list(own)
    best = find_best(candidates, values, policy.mode)
    while best:
        directory.check_writer()
        if _record_best(rest, directory, best, recorded, policy):
            if recorded and recorded not in {best[0].state_path, *records.dropped}:
                _let_expire(rest, recorded, own, policy.ttl_seconds)
            break
        candidates.remove(best[0])  # it has expired
        best = find_best(candidates, values, policy.mode)
    best_path = best[0].state_path if best else recorded
    # The records are newest first.
    old = [*own[policy.last :], *records.samplers[policy.last :]] if policy.last else []
    for record in old:
        if record.final or (record.state_path and record.state_path == best_path):
            continue
        if model_id := record.get(MODEL_ID, None):
            directory.check_writer()
            delete_model(log.client, model_id)
        for path in _paths(record):
            directory.check_writer()
            with service_errors(f"delete the checkpoint {path}"), suppress(tinker.NotFoundError):
                rest.delete_checkpoint_from_tinker_path(path).result()
            append_record(directory, {"name": record.name, "dropped": path})
    return best[0] if best else None


def _paths(record: CheckpointRecord) -> list[str]:
    """Return the paths of a checkpoint on the service, the state last: its deletion marks the record as deleted."""
    return [path for path in (record.sampler_path, record.state_path) if path]


def find_best(
    records: Sequence[CheckpointRecord], values: Mapping[int, float], mode: Literal["min", "max"]
) -> tuple[CheckpointRecord, float] | None:
    """Return the checkpoint with the best value of a metric and that value; the earliest checkpoint wins ties.

    Returns None if no checkpoint has a value.

    Args:
        values: metric by step. The value of a step was measured on the weights of the checkpoint of that step, so
            checkpoints without a value at their step are ignored.
    """
    measured = [(record, values.get(step_of(record), math.nan)) for record in records]
    measured = [(record, value) for record, value in measured if math.isfinite(value)]
    sign = 1 if mode == "min" else -1
    return min(measured, key=lambda pair: (sign * pair[1], step_of(pair[0])), default=None)


def count_candidates(directory: RunDirectory, values: Mapping[int, float]) -> int:
    """Count the checkpoints among which the best one is selected: those of the run with a metric value at their step.

    Deleted ones and those without a lifetime left count, too.

    Args:
        values: metric by step.
    """
    records = read_jsonl(directory, CHECKPOINTS_BASE_NAME, parse_record)
    own = [record for record in records if record.state_path and not record.has("parent")]
    return len({record.state_path for record in own if math.isfinite(values.get(step_of(record), math.nan))})


def _record_best(
    rest: tinker.RestClient,
    directory: RunDirectory,
    new_best: tuple[CheckpointRecord, float],
    recorded: str,
    policy: KeepPolicy,
) -> bool:
    """Make the service keep the best checkpoint, then record it; return False if it has already expired.

    It is then recorded as dropped. If the checkpoint was saved with a TTL, its lifetime is set even if it is the
    recorded best or if the policy has no TTL now, because an earlier start may have left it with one.
    """
    record, value = new_best
    path = record.state_path or ""
    may_expire = record.has("ttl_seconds") or (policy.ttl_seconds is not None and path != recorded)
    if may_expire and not all(_set_ttl(rest, weights, None) for weights in _paths(record)):
        append_record(directory, {"name": record.name, "dropped": path})
        return False
    if path != recorded:
        line = {"name": "best", "best": path, "best_step": step_of(record), "metric": policy.metric, "value": value}
        append_record(directory, line)
    return True


def _let_expire(rest: tinker.RestClient, best: str, own: Sequence[CheckpointRecord], ttl_seconds: int | None) -> None:
    """Give the previous best checkpoint the lifetime of others again unless it is final; its record may be missing."""
    record = next((record for record in own if record.state_path == best), None)
    if ttl_seconds is None or (record and record.final):
        return
    for path in _paths(record) if record else [best]:
        _set_ttl(rest, path, ttl_seconds)


def _set_ttl(rest: tinker.RestClient, path: str, ttl_seconds: int | None) -> bool:
    """Change the lifetime of a checkpoint; return False if the service no longer has it."""
    with service_errors(f"change the lifetime of the checkpoint {path}"):
        try:
            rest.set_checkpoint_ttl_from_tinker_path(path, ttl_seconds).result()
        except tinker.NotFoundError:
            return False
    return True
