"""Lookup of stored runs by name: the config, the MLflow run and the report of a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from mlflow import MlflowClient
from mlflow.entities import Run as MlflowRun

from blocks.errors import ConfigError, StorageError, TinkerFlowsError
from blocks.files.local_directory import LocalDirectory
from blocks.storage import CONFIG, RunDirectory
from deployments.methods import METHODS, config_type_of
from flows.config.base import NamedConfig
from flows.config.loader import set_overrides, validate_fields
from flows.monitoring.run_tags import REJECTED_TAG, STOPPED_TAG
from flows.runs.blocks import storage_at, tracking_at
from flows.runs.start.config_record import RecordedConfig
from flows.runs.tracking.mlflow_run import find_recorded_run
from objectives.errors import did_you_mean
from objectives.term_weights.targets import TargetSpec
from tasks.reports.summary import storage_option
from tasks.training.checkpoints import Records, read_records
from tasks.training.tracking.metric_names import safe_name
from tasks.training.tracking.metrics import MetricsLog

if TYPE_CHECKING:
    from tasks.reports.tables import Control, History

REPORT = "report.html"


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Run found in a storage.

    Attributes:
        fields: the config that the run was started with, as plain data.
    """

    name: str
    storage: str
    directory: RunDirectory
    fields: dict[str, Any]


def find_run(run_name: str, storage: str) -> StoredRun:
    """Return the run called `run_name`.

    Raises:
        ConfigError: the storage has no run of that name, or its config.json is invalid.
        StorageError: the run cannot be read.
    """
    if "/" in run_name:
        raise ConfigError(
            f"Run {run_name!r} is a path: use the name of its directory, and --storage for the folder of all runs."
        )
    run_storage = storage_at(storage)
    directory = run_storage.run_directory(run_name)
    content = directory.read_bytes(CONFIG)
    if content is None:
        from flows.sweeps.record import CONFIG_NAME  # imported late, because `status` needs it only for this error

        if directory.read_bytes(CONFIG_NAME) is not None:
            raise ConfigError(
                f"{run_name!r} is a sweep, not a run: its report is {directory.location}/{REPORT}, its trials are the "
                f"runs {run_name}-POINT-sSEED, and the command that started it resumes it."
            )
        names = run_storage.run_names()
        place = directory.location.removesuffix(run_name)
        if not names:
            raise ConfigError(f"Run {run_name!r} does not exist in {place}, which has no runs. Use another --storage.")
        stored = f"{', '.join(names[:20])}{' and others' if len(names) > 20 else ''}"
        raise ConfigError(
            f"Run {run_name!r} does not exist in {place}, which contains {stored}"
            f"{did_you_mean(run_name, names) or '.'} Use one of its runs or another --storage."
        )
    fields = RecordedConfig.parse(content, directory.location).fields
    return StoredRun(run_name, storage, directory, fields)


def resume_config(run: StoredRun, overrides: Sequence[str]) -> tuple[str, NamedConfig]:
    """Return the method of a run and the config that resumes it: the stored config with overrides applied.

    Raises:
        ConfigError: the stored config matches no method or several, or has another name, or an override is invalid.
    """
    fields = {**run.fields, "storage": run.storage}
    if fields.get("resume") == "never":  # "never" rejects an existing run name, and this run exists
        fields["resume"] = "auto"
    if "if_exists" in fields:  # `delete` and `ask` would delete the run, or ask about it
        fields["if_exists"] = "resume"
    methods = list(_matching_methods(fields))
    if len(methods) != 1:
        problem = f"matches {' and '.join(methods)}" if methods else f"matches none of the methods {', '.join(METHODS)}"
        raise ConfigError(
            f"The config {run.directory.location}/{CONFIG} {problem}: resume the run with `tinker-flows run METHOD` "
            "and its original config file."
        )
    config_type = config_type_of(methods[0])
    set_overrides(fields, overrides, config_type)
    config = validate_fields(config_type, fields)
    if config.run_name != run.name:  # the directory was renamed or copied, or an override has another name
        raise ConfigError(
            f"The run in {run.directory.location} resumes only under the name of this directory, but its run_name is "
            f"{config.run_name!r}: restore the name, or fork the run with `tinker-flows run {methods[0]} --config FILE "
            f"run_name=NEW resume={shlex.quote(run.name)}`."
        )
    return methods[0], config


def find_mlflow_run(run: StoredRun, records: Records) -> tuple[MlflowClient, MlflowRun | None]:
    """Return an MLflow client and the MLflow run that a run logs to; the MLflow run is None if there is none.

    Raises:
        ServiceError: MLflow does not respond.
    """
    reference, experiment = str(run.fields.get("tracking", "")), str(run.fields.get("experiment", "tinker-flows"))
    client = _client(reference, experiment)
    return client, find_recorded_run(client, tracking_at(reference, experiment), run.directory, records)


def report_of(
    run_name: str, storage: str, *, rebuild: bool, control: Mapping[str, Control] | None = None, effect: str = ""
) -> str:
    """Return the location of a run's report; build the report from MLflow if it is missing.

    Args:
        rebuild: build the report even if it exists.
        control, effect: held-out values of a run without the terms, and a sentence on the difference from them, to show
            in a report that is built.

    Raises:
        ConfigError: the run does not exist, or has not logged a step.
        ServiceError: MLflow does not respond.
        StorageError: the report has to be built, and another process is writing the run.
    """
    run = find_run(run_name, storage)
    location = f"{run.directory.location}/{REPORT}"
    if not rebuild and run.directory.read_bytes(REPORT) is not None:
        return location
    _check_ended(run)
    mlflow_run, log, history = _logged(run)
    from tasks.reports.run_report import ReportExtras, write_report
    from tasks.reports.tables import target_rows

    note = mlflow_run.data.tags.get(REJECTED_TAG, "")
    extras = ReportExtras(note, target_rows(history, _targets(run.fields)), control, effect)
    with run.directory as directory:
        return write_report.fn(directory, log, run_name, history, extras)


def _targets(fields: Mapping[str, Any]) -> dict[str, TargetSpec]:
    """Return the targets in a config by the name of their term, or by `reward/<name>`."""
    terms: list[dict[str, Any]] = (fields.get("objective") or {}).get("regularizers") or []
    rewards: dict[str, dict[str, Any]] = fields.get("rewards") or {}
    targets = {term["name"]: term.get("target") for term in terms}
    targets |= {safe_name(f"reward/{name}"): reward.get("target") for name, reward in rewards.items()}
    return {name: TargetSpec.model_validate(target) for name, target in targets.items() if target}


def compare_runs(first: str, second: str, storage: str) -> str:
    """Write a page that compares two runs into the directory of the second; return its location.

    Raises:
        ConfigError: a run does not exist, or has not logged a step.
        ServiceError: MLflow does not respond.
        StorageError: another process is writing the second run.
    """
    from tasks.reports.comparison import ReportedRun, comparison_page

    reported: list[ReportedRun] = []
    runs = [find_run(name, storage) for name in (first, second)]
    _check_ended(runs[1])
    for run in runs:
        mlflow_run, _, history = _logged(run)
        reported.append(ReportedRun(run.name, mlflow_run, run.directory, history))
    page = comparison_page(*reported)
    with reported[1].directory as directory:
        directory.write_bytes(f"report-with-{first}.html", page.encode())
        return f"{directory.location}/report-with-{first}.html"


def _check_ended(run: StoredRun) -> None:
    # On S3, the lease of a killed writer looks alive for a while. Locking the directory, before the page is written,
    # waits until the lease has expired.
    if isinstance(run.directory, LocalDirectory) and (writer := run.directory.writer()):
        command = f"tinker-flows status {shlex.quote(run.name)}{storage_option(run.name, run.directory.location)}"
        raise StorageError(
            f"Run {run.name!r} is in progress ({writer}), and its report is written at its end: see `{command}` and "
            "its MLflow run until then."
        )


def _logged(run: StoredRun) -> tuple[MlflowRun, MetricsLog, History]:
    """Return the MLflow run of a run with its metrics.

    Raises:
        ConfigError: the run has not logged a step.
        ServiceError: MLflow does not respond.
    """
    client, mlflow_run = find_mlflow_run(run, read_records(run.directory))
    if mlflow_run:
        log = MetricsLog(client, mlflow_run.info.run_id)
        history = log.history()
        if any(key.startswith("term/") for key in history):  # each trained step logs at least the base loss
            return mlflow_run, log, history
    why = mlflow_run.data.tags.get(STOPPED_TAG, "").rstrip(".") if mlflow_run else ""
    command = f"tinker-flows resume {shlex.quote(run.name)}{storage_option(run.name, run.directory.location)}"
    raise ConfigError(
        f"Run {run.name!r} has not logged a step yet{f' ({why})' if why else ''}, so there is nothing to report: "
        f"resume it with `{command}`."
    )


@cache
def _client(tracking: str, experiment: str) -> MlflowClient:
    """Return a client, which is cached because `status` needs one for each run."""
    return tracking_at(tracking, experiment).get_client()


def _matching_methods(fields: dict[str, Any]) -> Iterator[str]:
    """Yield the methods whose config accepts the fields; configs reject unknown and missing fields."""
    for method in METHODS:
        try:
            validate_fields(config_type_of(method), fields)
        except TinkerFlowsError:
            continue
        yield method
