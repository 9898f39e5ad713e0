"""Run name in use: resume the earlier run, delete it, or ask the user."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from mlflow.entities import LifecycleStage
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from tinker_cookbook.checkpoint_utils import CHECKPOINTS_BASE_NAME

from blocks.errors import ConfigError
from blocks.storage import CONFIG, RunDirectory
from blocks.terminal import print_notice
from flows.config.base import RunConfig
from flows.config.loader import field_values
from flows.runs.blocks import storage_of, tracking_at
from flows.runs.start.config_record import OF_STEPS, RecordedConfig
from flows.runs.start.fork import starts_of
from flows.runs.tracking.mlflow_run import find_recorded_run
from tasks.training.checkpoints import read_records, step_of
from tasks.training.tracking.logged_models import MODEL_ID, delete_model


def settle_run_name(config: RunConfig) -> None:
    """Do what `if_exists` says about an earlier run of the same name: keep it to resume it, delete it, or ask.

    A flow run that Prefect retries or restarts resumes its own run.

    Raises:
        ConfigError: `if_exists` is `ask`, and there is no terminal, or the user does not want to continue; or the run
            to delete has the initial weights or a teacher of the new run; or the initial weights do not exist.
        ServiceError: MLflow does not respond.
        StorageError: Another process is writing the run, or its files cannot be removed.
    """
    if config.if_exists == "resume" or (flow_run.get_run_count() or 1) > 1:
        return
    directory = storage_of(config).run_directory(config.run_name)
    if not any(directory.read_bytes(name) for name in (CONFIG, CHECKPOINTS_BASE_NAME)):
        return
    if config.if_exists == "delete" or _is_deletion_chosen(config, directory):
        _delete(config, directory)


def _is_deletion_chosen(config: RunConfig, directory: RunDirectory) -> bool:
    """Ask whether to delete a run, as tinker-cookbook does; return False to resume it."""
    in_use = f"The run name {config.run_name!r} is in use in {directory.location}"
    if not sys.stdin.isatty():
        raise ConfigError(
            f"{in_use} and if_exists is 'ask', but there is no terminal to ask in: set if_exists to 'resume' or "
            "'delete', or choose another run_name."
        )
    while True:
        steps = _steps_of_checkpoints(directory)
        print_notice(f"{in_use}, {f'with checkpoints at the steps {steps}' if steps else 'without checkpoints'}.")
        try:
            answer = input("What do you want to do? [delete, resume, exit]: ").strip()
        except EOFError:
            answer = "exit"
        if answer in ("delete", "resume"):
            return answer == "delete"
        if answer == "exit":
            raise ConfigError(f"{in_use} and was left as it is: choose another run_name to start a new run.")


def _delete(config: RunConfig, directory: RunDirectory) -> None:
    """Delete the files of a run and its MLflow run, and report what was deleted."""
    _check_origin(config)
    with directory:  # fails if another process is writing the run
        steps = _steps_of_checkpoints(directory)
        weights_left = f" The weights of its checkpoints at the steps {steps} stay on the service." if steps else ""
        mlflow = _delete_mlflow_run(config, directory)
        # Checkpoints and files of steps come first: after an interruption, the next start must not continue from them.
        # The config comes last: with it, the next deletion finds the other files.
        order = {CHECKPOINTS_BASE_NAME: 0, CONFIG: 3}
        names = sorted(
            directory.names(), key=lambda name: (order.get(name, 1 if name.startswith(OF_STEPS) else 2), name)
        )
        for name in names:
            directory.remove(name)
    text = (
        f"Deleted the earlier run {config.run_name!r}: {len(names)} files in {directory.location} "
        f"({', '.join(names)}){mlflow}.{weights_left}"
    )
    get_run_logger().warning("%s", text)
    print_notice(text)


def _check_origin(config: RunConfig) -> None:
    """Check that the new run's initial weights exist, and that its config names no checkpoint of the run to delete.

    `tinker://` paths, such as that of a reference, need no check: they remain valid without the record of their run.

    Raises:
        ConfigError: The initial weights do not exist, or they or a teacher's weights belong to the run to delete.
    """
    starts_of(config, storage_of(config))
    sources = [("init_from", config.init_from)]
    sources += [("a teacher's checkpoint", name) for name in field_values(config.model_dump(), "checkpoint")]
    for field, name in sources:
        if isinstance(name, str) and name.partition("@")[0] == config.run_name:
            raise ConfigError(f"{field} is {name!r}, a checkpoint of the run to delete: choose another run_name.")


def _delete_mlflow_run(config: RunConfig, directory: RunDirectory) -> str:
    """Delete the MLflow run of a run and its logged models, except registered ones.

    Returns:
        Clause about the MLflow run for the message; empty without an MLflow run.
    """
    fields: dict[str, Any] = {}
    with suppress(ConfigError):  # a damaged config names no tracking store
        fields = RecordedConfig.parse(directory.read_bytes(CONFIG) or b"{}", directory.location).fields
    reference = str(fields.get("tracking", config.tracking))
    tracking = tracking_at(reference, str(fields.get("experiment", config.experiment)))
    client = tracking.get_client()
    records = read_records(directory)
    mlflow_run = find_recorded_run(client, tracking, directory, records)
    if mlflow_run is None or mlflow_run.info.lifecycle_stage == LifecycleStage.DELETED:
        return ""
    run_id = mlflow_run.info.run_id
    with tracking.failures():
        versions = client.search_model_versions(f"run_id = '{run_id}'")
        registered = {version.tags.get("tinker_flows.model_id", "") for version in versions}
        models = {record.get(MODEL_ID, "") for record in (*records.checkpoints, *records.samplers)}
        for model_id in sorted(models - registered - {""}):
            delete_model(client, model_id)
        client.delete_run(run_id)
    return f", and the MLflow run {run_id}, which `mlflow runs restore --run-id {run_id}` restores"


def _steps_of_checkpoints(directory: RunDirectory) -> str:
    """Return the steps of a run's checkpoints for a message; empty without checkpoints."""
    records = read_records(directory)
    steps = {step_of(record) for record in (*records.checkpoints, *records.samplers)}
    return ", ".join(map(str, sorted(steps)))
