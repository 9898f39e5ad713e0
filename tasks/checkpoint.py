"""Checkpoints: what was saved on the service, recorded in the run's checkpoints.jsonl.

The file has tinker-cookbook's form. `batch` is the next step to run, counted from the first epoch on, and the weights
in `state_path` hold exactly that many updates, because the save is enqueued right behind the `optim_step` of step
`batch - 1`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

import tinker
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
    name: str
    state: tinker.APIFuture[types.SaveWeightsResponse]
    sampler: tinker.APIFuture[types.SaveWeightsForSamplerResponse] | None


def enqueue_checkpoint(client: tinker.TrainingClient, step: int, epoch: int, final: bool) -> PendingCheckpoint:
    """Ask for a save of the weights as they are after every update asked for; the final one can be sampled from."""
    name = "final" if final else f"{step:06d}"
    state = client.save_state(name)
    return PendingCheckpoint(step, epoch, name, state, client.save_weights_for_sampler(name) if final else None)


@step_task(name="checkpoint", task_run_name="checkpoint-{pending.name}")
def record_checkpoint(
    pending: PendingCheckpoint, directory: RunDirectory, log: MetricsLog, objective: dict[str, Any]
) -> CheckpointRecord:
    """Wait for a save, make the metrics up to it durable, and only then record it, with the objective's state."""
    doing = f"save the checkpoint before step {pending.step}"
    state_path = wait_for_answer(pending.state, doing).path
    sampler_path = wait_for_answer(pending.sampler, doing).path if pending.sampler else None
    log.flush()
    record = CheckpointRecord(
        name=pending.name,
        batch=pending.step,
        epoch=pending.epoch,
        final=pending.sampler is not None,
        state_path=state_path,
        sampler_path=sampler_path,
        extra={"mlflow_run_id": log.run_id, "objective": objective},
    )
    directory.append_line(CHECKPOINTS_BASE_NAME, json.dumps(record.to_dict()))
    return record


def resumable(directory: RunDirectory) -> list[CheckpointRecord]:
    """The records that hold weights and optimizer, newest first; a torn line is skipped with a warning."""
    records: list[CheckpointRecord] = []
    content = directory.read_bytes(CHECKPOINTS_BASE_NAME) or b""
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        try:
            record = CheckpointRecord.from_dict(json.loads(line))
        except (ValueError, KeyError, AttributeError, TypeError):
            where = f"{directory.location}/{CHECKPOINTS_BASE_NAME}"
            logger.warning("Line %d of %s is not a whole record and is skipped.", number, where)
            continue
        if record.state_path and record.batch is not None:
            records.append(record)
    return records[::-1]
