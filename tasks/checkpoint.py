"""Checkpoints: what was saved on the service, recorded in the run's checkpoints.jsonl.

The file has tinker-cookbook's form, so that its loops go on with a run of this project, and the other way round:
`batch` is the next batch to train on within the epoch `epoch`, and beside it stands `step`, the same counted from the
first epoch on. The weights in `state_path` hold exactly `step` updates, because the save is enqueued right behind the
`optim_step` of step `step - 1`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tinker
from prefect.runtime import flow_run
from tinker import types
from tinker_cookbook.checkpoint_utils import CHECKPOINTS_BASE_NAME, CheckpointRecord

from blocks.storage import RunDirectory
from tasks.answer import wait_for_answer
from tasks.metrics import MetricsLog
from tasks.options import step_task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A save under way on the service; `step` is the step that its weights start from."""

    step: int
    epoch: int
    batch: int
    name: str
    state: tinker.APIFuture[types.SaveWeightsResponse]
    sampler: tinker.APIFuture[types.SaveWeightsForSamplerResponse] | None


@dataclass(frozen=True, slots=True)
class Records:
    """What checkpoints.jsonl tells.

    Attributes:
        checkpoints: the records that hold weights and optimizer, newest first, without those that were dropped.
        dropped: the tinker:// paths of those that the run itself deleted on the service.
        best: the newest line that names the best checkpoint; empty where there is none.
    """

    checkpoints: tuple[CheckpointRecord, ...]
    dropped: frozenset[str]
    best: Mapping[str, Any]


def enqueue_checkpoint(
    client: tinker.TrainingClient, step: int, steps_per_epoch: int, *, final: bool, ttl_seconds: int | None
) -> PendingCheckpoint:
    """Ask for a save of the weights as they are after every update asked for.

    The final one is kept for ever and can be sampled from; another one for `ttl_seconds` (None: for ever).
    """
    name = "final" if final else f"{step:06d}"
    state = client.save_state(name, ttl_seconds=None if final else ttl_seconds)
    sampler = client.save_weights_for_sampler(name) if final else None
    return PendingCheckpoint(step, *divmod(step, steps_per_epoch), name, state, sampler)


@step_task(name="checkpoint", task_run_name="checkpoint-{pending.name}")
def record_checkpoint(
    pending: PendingCheckpoint, directory: RunDirectory, log: MetricsLog, state: Mapping[str, Any]
) -> CheckpointRecord:
    """Wait for a save, make the metrics up to it durable, and only then record it, with the state of all else."""
    doing = f"save the checkpoint before step {pending.step}"
    state_path = wait_for_answer(pending.state, doing).path
    sampler_path = wait_for_answer(pending.sampler, doing).path if pending.sampler else None
    log.flush()
    record = CheckpointRecord(
        name=pending.name,
        batch=pending.batch,
        epoch=pending.epoch,
        final=pending.sampler is not None,
        state_path=state_path,
        sampler_path=sampler_path,
        extra={
            "step": pending.step,
            "mlflow_run_id": log.run_id,
            "flow_run_id": flow_run.get_id(),
            "flow_run_count": flow_run.get_run_count(),
            **state,
        },
    )
    append_record(directory, record.to_dict())
    return record


def append_record(directory: RunDirectory, line: Mapping[str, Any]) -> None:
    """Add a line to checkpoints.jsonl; tinker-cookbook passes over one that has no `state_path`."""
    directory.append_line(CHECKPOINTS_BASE_NAME, json.dumps(line))


def step_of(record: CheckpointRecord) -> int:
    """The next step to run, counted from the first epoch on; for a record of tinker-cookbook, see `cookbook_step`."""
    return int(record.get("step", record.batch or 0))


def resumable(directory: RunDirectory) -> list[CheckpointRecord]:
    """The records that hold weights and optimizer, newest first; a torn line is skipped with a warning."""
    return list(read_records(directory).checkpoints)


def read_records(directory: RunDirectory) -> Records:
    """Read checkpoints.jsonl; a torn line is skipped with a warning."""
    checkpoints: list[CheckpointRecord] = []
    dropped: set[str] = set()
    best: Mapping[str, Any] = {}
    content = directory.read_bytes(CHECKPOINTS_BASE_NAME) or b""
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        try:
            record = CheckpointRecord.from_dict(json.loads(line))
        except (ValueError, KeyError, AttributeError, TypeError):
            where = f"{directory.location}/{CHECKPOINTS_BASE_NAME}"
            logger.warning("Line %d of %s is not a whole record and is skipped.", number, where)
            continue
        if record.state_path and record.batch is not None:
            checkpoints.append(record)
        elif path := record.get("dropped", None):
            dropped.add(path)
        elif record.get("best", None):
            best = record.extra
    living = tuple(each for each in reversed(checkpoints) if each.state_path not in dropped)
    return Records(living, frozenset(dropped), best)
