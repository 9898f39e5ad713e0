"""A run as its directory keeps it: found again by its name, with the config it was started with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from mlflow import MlflowClient
from mlflow.entities import Run as MlflowRun
from mlflow.exceptions import MlflowException

from blocks.errors import ConfigError, TinkerFlowsError
from blocks.storage import CONFIG, RunDirectory
from blocks.tracking import RECORD_TAG
from deployments.methods import METHODS, config_type_of
from flows.blocks_of import storage_at, tracking_at
from flows.config import NamedConfig
from flows.config_file import set_field, validate_fields
from flows.record import record_key
from tasks.checkpoint import Records


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run of a storage.

    Attributes:
        fields: of the config it was started with.
    """

    name: str
    storage: str
    directory: RunDirectory
    fields: dict[str, Any]


def recorded_run(run_name: str, storage: str) -> RecordedRun:
    """The run of a name.

    Raises:
        ConfigError: the storage has no such run, or it is none of this project's.
        StorageError: it cannot be read.
    """
    at = storage_at(storage)
    directory = at.run_directory(run_name)
    written = directory.read_bytes(CONFIG)
    if written is None:
        names = at.run_names()
        there = f"it has {', '.join(names[:20])}{' and others' if len(names) > 20 else ''}" if names else "it is empty"
        raise ConfigError(
            f"There is no run {run_name!r} in {directory.location.removesuffix(run_name)}, {there}: give one of its "
            "runs, or another --storage."
        )
    try:
        fields = json.loads(written)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f"{directory.location}/{CONFIG} is no config of a run: restore it to go on with that run.")
    return RecordedRun(run_name, storage, directory, fields)


def config_to_go_on(run: RecordedRun, overrides: Sequence[str]) -> tuple[str, NamedConfig]:
    """The method of a run, and its config to go on with, where it was found and with what is given anew.

    Raises:
        ConfigError: no method has such a config, or an override is wrong.
    """
    fields = {**run.fields, "storage": run.storage}
    if fields.get("resume") == "never":  # it was to refuse a name in use, which this one is
        fields["resume"] = "auto"
    fitting = list(_methods_of(fields))
    if len(fitting) != 1:
        known = f"of {' or '.join(fitting)}" if fitting else f"of no method there is ({', '.join(METHODS)})"
        raise ConfigError(
            f"{run.directory.location}/{CONFIG} is the config {known}: start the run with `tinker-flows run METHOD` "
            "and the config file it had."
        )
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"The argument {override!r} is not of the form field=value, as in learning_rate=1e-4.")
        set_field(fields, key, yaml.safe_load(value))
    return fitting[0], validate_fields(config_type_of(fitting[0]), fields)


def mlflow_run_of(run: RecordedRun, records: Records) -> tuple[MlflowClient, MlflowRun | None]:
    """The MLflow run that a run logs to, if there is one, and a client for it.

    Raises:
        ServiceError: MLflow cannot be asked.
    """
    reference, experiment = str(run.fields.get("tracking", "")), str(run.fields.get("experiment", "tinker-flows"))
    client = _client(reference, experiment)
    tracking = tracking_at(reference, experiment)
    with tracking.failures():
        known = next((each.extra["mlflow_run_id"] for each in records.checkpoints if each.has("mlflow_run_id")), None)
        if known:
            with suppress(MlflowException):  # another tracking store than before does not have it
                return client, client.get_run(str(known))
        query = f"tags.`{RECORD_TAG}` = '{record_key(run.directory)}'"
        found = client.search_runs([tracking.experiment_id(client)], query)
    return client, found[0] if found else None


@cache
def _client(tracking: str, experiment: str) -> MlflowClient:
    return tracking_at(tracking, experiment).get_client()


def _methods_of(fields: dict[str, Any]) -> Iterator[str]:
    """The methods that a config can be of: it has every field of its method, and no other."""
    for method in METHODS:
        try:
            validate_fields(config_type_of(method), fields)
        except TinkerFlowsError:
            continue
        yield method
