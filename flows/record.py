"""A run's record in its own directory and in MLflow: opened at its beginning, found again at every later start."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Param
from mlflow.exceptions import MlflowException
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks import MLflowTracking, TinkerService
from blocks.errors import ConfigError, ServiceError
from blocks.storage import CONFIG, RunDirectory
from flows.blocks_of import tracking_of
from flows.config import RunConfig
from flows.cookbook_run import set_aside_config
from flows.stop import CancelledInTheUI
from tasks.checkpoint import step_of
from tasks.metrics import MetricsLog

# What may differ between the parts of one run: where it computes and how often it looks, never what it trains.
_MAY_CHANGE = {
    "base_url",
    "tracking",
    "experiment",
    "mlflow_tags",
    "storage",
    "resume",
    "max_restarts",
    "guards",
    "budget",
    "checkpoint_every",
    "eval_every",
    "evaluators",
    "keep_last",
    "keep_best",
    "ttl_seconds",
    "register_as",
    "promote_if",
}


def check_config(
    directory: RunDirectory, config: RunConfig, start: CheckpointRecord | None, restarts: Sequence[str]
) -> None:
    """Keep the config of a run as its record, and hold every later start to it once there is a checkpoint.

    Args:
        restarts: not empty where this very run goes on, which may do so under `never` too.

    Raises:
        ConfigError: the name is in use by a run with another config, or `resume` is `never`.
    """
    if set_aside_config(directory) or start is None:
        directory.write_bytes(CONFIG, config.model_dump_json(indent=2).encode())
        return
    if config.resume == "never" and not restarts:
        raise ConfigError(
            f"The run name {config.run_name!r} is in use in {directory.location} and resume is `never`: "
            "choose another run_name, or resume: auto to go on with that run."
        )
    changed = changed_fields(directory, config)
    if changed:
        raise ConfigError(
            f"The run {config.run_name!r} (now at step {step_of(start)}) was started with another "
            f"{', '.join(changed)}: restore it or choose another run_name; the first config is "
            f"{directory.location}/{CONFIG}."
        )


def changed_fields(directory: RunDirectory, config: RunConfig) -> list[str]:
    """The fields in which a config differs from the recorded one and may not; none where nothing is recorded."""
    recorded = directory.read_bytes(CONFIG)
    if recorded is None:
        return []
    # Read as a config, so that a field that a later release adds has its default.
    before, now = type(config).model_validate_json(recorded).model_dump(), config.model_dump()
    return sorted(key for key in now.keys() - _MAY_CHANGE if now[key] != before[key])


@contextmanager
def open_log(
    service: TinkerService,
    config: RunConfig,
    directory: RunDirectory,
    records: Sequence[CheckpointRecord],
    restarts: Sequence[str],
) -> Iterator[MetricsLog]:
    """The run's one MLflow run, marked finished, failed or killed at the end; after a kill -9 it stays RUNNING."""
    tracking = tracking_of(config)
    client = tracking.get_client()
    with tracking.failures():
        run_id = _mlflow_run(tracking, client, config, directory, records)
        why = {f"tinker_flows.restart.{number}": reason for number, reason in enumerate(restarts, start=1)}
        for key, value in {**config.mlflow_tags, **origin_tags(service.resolved_url), **why}.items():
            client.set_tag(run_id, key, value)
        client.update_run(run_id, status="RUNNING")
        log = MetricsLog(client, run_id)
    status = "FAILED"
    try:
        yield log
        log.flush()
        status = "FINISHED"
    except (KeyboardInterrupt, TerminationSignal, CancelledInTheUI):
        status = "KILLED"
        raise
    finally:
        # Where the store itself is what failed, its first error is the one to tell.
        with suppress(ServiceError), tracking.failures():
            log.flush()
        with suppress(ServiceError), tracking.failures():
            client.set_terminated(run_id, status=status)


def _mlflow_run(
    tracking: MLflowTracking,
    client: MlflowClient,
    config: RunConfig,
    directory: RunDirectory,
    records: Sequence[CheckpointRecord],
) -> str:
    """The MLflow run of the newest checkpoint, or the one of this record."""
    known = next((each.extra["mlflow_run_id"] for each in records if each.has("mlflow_run_id")), None)
    if known:
        with suppress(MlflowException):  # another tracking store than before does not have it
            return client.get_run(str(known)).info.run_id
    run = tracking.recorded_run(client, config.run_name, record_key(directory), {})
    if not run.data.params:
        params = [Param(key, str(value)[:6000]) for key, value in flatten(config.model_dump(mode="json")).items()]
        client.log_batch(run.info.run_id, params=params)
    return run.info.run_id


def record_key(directory: RunDirectory) -> str:
    """Which record a run's MLflow run belongs to, as its tag says."""
    record = directory.location.encode() + (directory.read_bytes(CONFIG) or b"")
    return hashlib.sha256(record).hexdigest()


def origin_tags(service_url: str) -> dict[str, str]:
    """What made an MLflow run: the flow run, the service and the commit."""
    tags = {
        "prefect.flow_run_id": flow_run.get_id() or "",
        "prefect.flow_name": flow_run.get_flow_name() or "",
        "tinker.base_url": service_url,
        "mlflow.source.git.commit": _commit(),
    }
    return {key: value for key, value in tags.items() if value}


def _commit() -> str:
    """The commit that this project runs from; empty where it is no git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git here
        return ""


def flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config's fields by their dotted paths, entries of a list by their names."""
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            flat |= flatten({str(item.get("name", i)): item for i, item in enumerate(value)}, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
