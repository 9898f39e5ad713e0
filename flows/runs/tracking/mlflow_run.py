"""MLflow run of a flow: find or create it at the start, and set its final status at the end."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Param
from mlflow.entities import Run as MlflowRun
from mlflow.exceptions import MlflowException
from prefect.exceptions import Pause, TerminationSignal
from prefect.runtime import deployment, flow_run
from pydantic import BaseModel
from pydantic_core import to_jsonable_python
from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks import MLflowTracking, TinkerService
from blocks.errors import ServiceError, StorageError
from blocks.mlflow_internals import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST, ErrorCode
from blocks.storage import CONFIG, RunDirectory
from blocks.tracking import RECORD_TAG
from flows.config.base import RunConfig, TrackedConfig
from flows.monitoring.interrupts import RunCancelled
from flows.monitoring.run_tags import STOPPED_TAG, forget_end
from flows.runs.blocks import tracking_of
from tasks.reports.html import DESCRIPTION_TAG, flow_run_link, markdown_code
from tasks.training.checkpoints import Records
from tasks.training.tracking.metric_names import safe_name
from tasks.training.tracking.metrics import MetricsLog

MAX_PARAM_LENGTH = 6000  # MLflow's limit
# Newest opening of a run, and the status with which each opening ended. A process that was frozen in the middle of its
# last request may send it after another process has taken over the run; these tags tell both apart.
_OPENING_TAG, _ENDED_TAG = "tinker_flows.opening", "tinker_flows.ended"
# Errors for the id of a run that the store does not have, or that another kind of store has given.
_UNKNOWN_RUN = {ErrorCode.Name(RESOURCE_DOES_NOT_EXIST), ErrorCode.Name(INVALID_PARAMETER_VALUE)}
_SHOWN = {"model", "learning_rate", "lr_schedule", "lora_rank", "seed"}


@contextmanager
def open_mlflow_run(  # noqa: PLR0913 - all describe one MLflow run
    tracking: MLflowTracking,
    run_name: str,
    record: str,
    *,
    params: Mapping[str, object],
    tags: Mapping[str, str],
    run_id: str | None = None,
    check_writer: Callable[[], None] = lambda: None,
) -> Iterator[MetricsLog]:
    """Open an MLflow run, and mark it FINISHED, FAILED or KILLED at the end; after a kill -9 it stays RUNNING.

    Args:
        record: value of the tag that identifies the run. A run with this tag is reused; otherwise a run is created.
        params: params of the run, logged only if it has none yet.
        tags: tags of the run, set at every start.
        run_id: id of the MLflow run of an earlier start, or None; ignored if the tracking store has no such run.
        check_writer: raises StorageError if another process has taken over the run. This process then neither logs to
            the MLflow run nor ends it.

    Raises:
        ServiceError: MLflow does not respond or rejects a request, or the MLflow run of the earlier start is deleted.
    """
    client = tracking.get_client()
    tags = {safe_name(key): value for key, value in tags.items()}
    with tracking.failures():
        check_writer()  # if the directory was removed, the record differs, and a second MLflow run would be created
        run = _find_active_run(tracking, client, run_id) or tracking.find_or_create_run(client, run_name, record, tags)
        check_writer()
        if not run.data.params:
            entries = [Param(safe_name(key), str(value)[:MAX_PARAM_LENGTH]) for key, value in params.items()]
            client.log_batch(run.info.run_id, params=entries)
        for key, value in tags.items():
            client.set_tag(run.info.run_id, key, value)
        opening = uuid4().hex
        client.set_tag(run.info.run_id, _OPENING_TAG, opening)
        client.update_run(run.info.run_id, status="RUNNING")
        log = MetricsLog(client, run.info.run_id, check_writer)
        if STOPPED_TAG in run.data.tags:
            forget_end(log)
    status = "FAILED"
    try:
        yield log
        log.flush()
        status = "FINISHED"
    except (KeyboardInterrupt, TerminationSignal, RunCancelled):
        status = "KILLED"
        raise
    except (Exception, Pause) as error:
        reason = " ".join((str(error) or type(error).__name__).split())
        if isinstance(error, Pause):
            status, reason = "KILLED", "The flow run was suspended in Prefect; Resume continues it."
        with suppress(ServiceError, StorageError), tracking.failures():
            log.flush()
        with suppress(ServiceError, StorageError), tracking.failures():
            check_writer()
            client.set_tag(log.run_id, STOPPED_TAG, reason)
        raise
    finally:
        # If the tracking store or the storage failed, raise the first error and suppress the errors of this cleanup.
        with suppress(ServiceError, StorageError), tracking.failures():
            log.flush()
        with suppress(ServiceError, StorageError), tracking.failures():
            check_writer()
            client.set_tag(log.run_id, f"{_ENDED_TAG}.{opening}", status)
            client.set_terminated(log.run_id, status=status)
            _restore_status(client, log.run_id, opening)


def _restore_status(client: MlflowClient, run_id: str, opening: str) -> None:
    """Restore the status of a run that another process has opened since, and perhaps ended."""
    last_status = None
    while True:
        tags = client.get_run(run_id).data.tags
        newest = tags.get(_OPENING_TAG, opening)  # a user may have removed the tag
        current = tags.get(f"{_ENDED_TAG}.{newest}", "RUNNING")
        if newest == opening or current == last_status:
            return
        client.update_run(run_id, status=current)
        last_status = current  # read again, because the other process may have ended the run in the meantime


def open_log(
    service: TinkerService,
    config: RunConfig,
    directory: RunDirectory,
    records: Sequence[CheckpointRecord],
    restarts: Sequence[str],
) -> AbstractContextManager[MetricsLog]:
    """Open the MLflow run of a training run, found by the run id in the newest checkpoint or by `record_key`."""
    reasons = {f"tinker_flows.restart.{number}": reason for number, reason in enumerate(restarts, start=1)}
    return open_mlflow_run(
        tracking_of(config),
        config.run_name,
        record_key(directory),
        params=changed_fields_of(config),
        tags={
            **config.mlflow_tags,
            **origin_tags(service.resolved_url),
            **reasons,
            DESCRIPTION_TAG: _announcement(config),
        },
        run_id=next((str(record.extra["mlflow_run_id"]) for record in records if record.has("mlflow_run_id")), None),
        check_writer=directory.check_writer,
    )


@contextmanager
def open_measurement(
    config: TrackedConfig, run_name: str, service_url: str, tags: Mapping[str, str]
) -> Iterator[MetricsLog]:
    """Open the MLflow run of a flow that evaluates weights without training them.

    The MLflow run is new, unless the flow run was suspended or retried: the flow run then reopens its MLflow run, in
    which the values of the newest measurement count.
    """
    with open_mlflow_run(
        tracking_of(config),
        run_name,
        flow_run.get_id() or uuid4().hex,
        params=changed_fields_of(config),
        tags={**origin_tags(service_url), **tags},
    ) as log:
        log.starts_over = True
        yield log


def find_recorded_run(
    client: MlflowClient, tracking: MLflowTracking, directory: RunDirectory, records: Records
) -> MlflowRun | None:
    """Return the MLflow run that a stored run logs to; None if the tracking store has none.

    Raises:
        ServiceError: MLflow does not respond.
    """
    with tracking.failures():
        saved = (*records.checkpoints, *records.samplers)
        run_id = next((str(record.extra["mlflow_run_id"]) for record in saved if record.has("mlflow_run_id")), None)
        if run := _find_run(client, run_id):
            return run
        query = f"tags.`{RECORD_TAG}` = '{record_key(directory)}'"
        matches = client.search_runs([tracking.experiment_id(client)], query)
    return matches[0] if matches else None


def _find_run(client: MlflowClient, run_id: str | None) -> MlflowRun | None:
    """Return a run; None if it was deleted for good, or if the flow now uses another tracking store."""
    try:
        return client.get_run(run_id) if run_id else None
    except MlflowException as error:
        if error.error_code not in _UNKNOWN_RUN:
            raise
        return None


def _find_active_run(tracking: MLflowTracking, client: MlflowClient, run_id: str | None) -> MlflowRun | None:
    run = _find_run(client, run_id)
    if run and run.info.lifecycle_stage == LifecycleStage.DELETED:
        raise ServiceError(
            f"The MLflow run {run_id} at {tracking.shown_uri} is deleted: restore it "
            f"(`mlflow runs restore --run-id {run_id}`) or choose another run_name."
        )
    return run


def record_key(directory: RunDirectory) -> str:
    """Return the tag value that identifies a run's MLflow run: a hash of its directory and its config."""
    record = directory.location.encode() + (directory.read_bytes(CONFIG) or b"")
    return hashlib.sha256(record).hexdigest()


def _announcement(config: RunConfig) -> str:
    """Return the description of a run until its report replaces it."""
    model, method = markdown_code(config.model), flow_run.get_flow_name()
    return f"Training of {model} by `{method}` in progress.\n\n{flow_run_link()}"


def origin_tags(service_url: str) -> dict[str, str]:
    """Return tags that name the origin of an MLflow run: flow run, service and commit."""
    tags = {
        "prefect.flow_run_id": flow_run.get_id() or "",
        "prefect.flow_name": flow_run.get_flow_name() or "",
        "tinker.base_url": service_url,
        "mlflow.source.git.commit": _commit(),
        "mlflow.source.name": f"flows.{flow_run.get_flow_name()}" if flow_run.get_flow_name() else "",
        "mlflow.source.type": "JOB" if deployment.id else "LOCAL",
    }
    return {key: value for key, value in tags.items() if value}


def _commit() -> str:
    """Return the current git commit; empty outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed
        return ""


def changed_fields_of(config: BaseModel) -> dict[str, Any]:
    """Flatten the fields of a config that differ from their defaults, and those that reports always show."""
    defaults = {
        name: to_jsonable_python(field.get_default(call_default_factory=True, validated_data={}))
        for name, field in type(config).model_fields.items()
        if not field.is_required()
    }
    default = flatten(defaults)
    fields = flatten(config.model_dump(mode="json"))
    return {key: value for key, value in fields.items() if key in _SHOWN or (key, value) not in default.items()}


def flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a config to dotted keys; a mapping in a list is named by its `name`, or by its index if it has none.

    If two names are equal, all mappings of the list are named by their index.

    >>> flatten({"a": [{"name": "x", "v": 1}, {"v": 2}], "b": [{"name": "x"}, {"name": "x"}], "c": [{"v": 1}, 2]})
    {'a.x.name': 'x', 'a.x.v': 1, 'a.1.v': 2, 'b.0.name': 'x', 'b.1.name': 'x', 'c': [{'v': 1}, 2]}
    """
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            names = [str(item.get("name", i)) for i, item in enumerate(value)]
            keys = names if len(set(names)) == len(names) else map(str, range(len(names)))
            flat |= flatten(dict(zip(keys, value, strict=True)), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
