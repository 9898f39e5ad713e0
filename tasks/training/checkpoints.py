"""Checkpoints on the service and their records in the run's checkpoints.jsonl.

The file has tinker-cookbook's format, so that tinker-cookbook's loops can resume a run of this project and vice versa.
`batch` is the next batch within the epoch `epoch`; the extra field `step` counts batches from the first epoch. The
weights in `state_path` contain exactly `step` updates, because the save is enqueued right after the `optim_step` of
step `step - 1`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import tinker
from mlflow.exceptions import MlflowException
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from tinker import types
from tinker_cookbook.checkpoint_utils import CHECKPOINTS_BASE_NAME, CheckpointRecord

from blocks.errors import ServiceError, reason
from blocks.storage import RunDirectory
from tasks.common.jsonl import read_jsonl
from tasks.common.service_errors import wait_for_response
from tasks.common.task import step_task
from tasks.training.tracking.logged_models import MODEL_ID, log_model
from tasks.training.tracking.metrics import MetricsLog

# Key of a record for the digests of the content that the run depends on.
CONTENTS_KEY = "contents"

# Types of the fields of a record that the project reads. A record may lack each of them.
_TYPES = {
    **dict.fromkeys(("batch", "epoch", "step", "best_step", "ttl_seconds"), int),
    **dict.fromkeys(("name", "state_path", "sampler_path", "dropped", "best"), str),
    **dict.fromkeys(("parent", CONTENTS_KEY), dict),
}

# Content of a checkpoint, as tinker-cookbook's `save_checkpoint` names it.
Kind = Literal["state", "sampler", "both"]


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """Save in progress on the service; `step` is the step that starts from its weights.

    At least one of `state` and `sampler` is set; the final checkpoint has both.
    """

    step: int
    epoch: int
    batch: int
    name: str
    is_final: bool
    state: tinker.APIFuture[types.SaveWeightsResponse] | None
    sampler: tinker.APIFuture[types.SaveWeightsForSamplerResponse] | None
    ttl_seconds: int | None


@dataclass(frozen=True, slots=True)
class Records:
    """Content of checkpoints.jsonl.

    Attributes:
        checkpoints: records with weights and optimizer state, newest first, without deleted checkpoints.
        samplers: records with sampler weights alone, newest first, without deleted ones.
        dropped: tinker:// paths of the checkpoints that the run deleted on the service.
        best: newest record of the best checkpoint; empty without one.
    """

    checkpoints: tuple[CheckpointRecord, ...]
    samplers: tuple[CheckpointRecord, ...]
    dropped: frozenset[str]
    best: Mapping[str, Any]


def enqueue_checkpoint(
    client: tinker.TrainingClient,
    step: int,
    steps_per_epoch: int,
    *,
    kind: Kind,
    final: bool,
    ttl_seconds: int | None,
) -> PendingCheckpoint:
    """Enqueue a save of the weights after all updates enqueued so far.

    The final checkpoint is of the kind `both` and never expires. Other checkpoints expire after `ttl_seconds`; None
    means never.
    """
    name, ttl = ("final", None) if final else (f"{step:06d}", ttl_seconds)
    state = client.save_state(name, ttl_seconds=ttl) if final or kind != "sampler" else None
    sampler = client.save_weights_for_sampler(name, ttl_seconds=ttl) if final or kind != "state" else None
    return PendingCheckpoint(step, *divmod(step, steps_per_epoch), name, final, state, sampler, ttl)


@step_task(name="checkpoint", task_run_name="checkpoint-{pending.name}")
def record_checkpoint(
    pending: PendingCheckpoint,
    directory: RunDirectory,
    log: MetricsLog,
    state: Mapping[str, Any],
    origin: Mapping[str, str],
) -> CheckpointRecord:
    """Wait for a save, flush the metrics, log the model, and then append the record with the state of the run.

    Args:
        origin: tags of the logged model, such as the name of the run.
    """
    doing = f"save the checkpoint before step {pending.step}"
    state_path = wait_for_response(pending.state, doing).path if pending.state else None
    sampler_path = wait_for_response(pending.sampler, doing).path if pending.sampler else None
    log.flush()
    paths = {"tinker.path": sampler_path, "tinker.state_path": state_path}
    tags = {**origin, **{key: path for key, path in paths.items() if path}}
    saved = read_records(directory)
    recorded = {str(record.get(MODEL_ID, "")) for record in (*saved.checkpoints, *saved.samplers)}
    try:
        model = {MODEL_ID: log_model(log, f"checkpoint-{pending.name}", pending.step, tags, recorded)}
    except (MlflowException, ServiceError) as error:  # the checkpoint itself is saved
        model = {}
        text = "MLflow did not store the checkpoint %s as a logged model (%s); the run can resume from it nevertheless."
        get_run_logger().warning(text, pending.name, reason(error))
    record = CheckpointRecord(
        name=pending.name,
        batch=pending.batch,
        epoch=pending.epoch,
        final=pending.is_final,
        state_path=state_path,
        sampler_path=sampler_path,
        extra={
            "step": pending.step,
            **({"ttl_seconds": pending.ttl_seconds} if pending.ttl_seconds is not None else {}),
            "mlflow_run_id": log.run_id,
            "flow_run_id": flow_run.get_id(),
            "flow_run_count": flow_run.get_run_count(),
            **model,
            **state,
        },
    )
    append_record(directory, record.to_dict())
    return record


def append_record(directory: RunDirectory, line: Mapping[str, Any]) -> None:
    """Append a record to checkpoints.jsonl; tinker-cookbook ignores records without `state_path`."""
    directory.append_line(CHECKPOINTS_BASE_NAME, json.dumps(line))


def step_of(record: CheckpointRecord) -> int:
    """Next step of a checkpoint, counted from the first epoch; see `cookbook_step` for tinker-cookbook's records."""
    return int(record.get("step", record.batch or 0))


def resumable(directory: RunDirectory) -> list[CheckpointRecord]:
    """Return the records with weights and optimizer state, newest first, without deleted checkpoints."""
    return list(read_records(directory).checkpoints)


def parse_record(fields: Any) -> CheckpointRecord:
    """Parse a line of checkpoints.jsonl.

    Raises:
        KeyError, AttributeError, TypeError: the line is no record, or a field has another type.
    """
    record = CheckpointRecord.from_dict(fields)
    for name, expected in _TYPES.items():
        value = record.get(name, None)
        if value is not None and not isinstance(value, expected):
            raise TypeError(f"{name} is {value!r}")
    return record


def read_records(directory: RunDirectory) -> Records:
    """Read checkpoints.jsonl; a torn or malformed line is skipped with a warning."""
    checkpoints: list[CheckpointRecord] = []
    samplers: list[CheckpointRecord] = []
    dropped: set[str] = set()
    best: Mapping[str, Any] = {}
    for record in read_jsonl(directory, CHECKPOINTS_BASE_NAME, parse_record):
        if record.state_path and record.batch is not None:
            checkpoints.append(record)
        elif record.sampler_path and record.batch is not None:
            samplers.append(record)
        elif path := record.get("dropped", None):
            dropped.add(path)
        elif record.get("best", None):
            best = record.extra
    existing = tuple(record for record in reversed(checkpoints) if record.state_path not in dropped)
    existing_samplers = tuple(record for record in reversed(samplers) if record.sampler_path not in dropped)
    return Records(existing, existing_samplers, frozenset(dropped), best)
