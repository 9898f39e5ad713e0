"""Record of a sweep in its directory and in MLflow, with the trials' runs as children."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.runtime import flow_run
from pydantic import ValidationError

from blocks import MLflowTracking
from blocks.errors import ConfigError
from blocks.storage import RunDirectory
from flows.runs.blocks import tracking_of
from flows.runs.tracking.mlflow_run import open_mlflow_run
from flows.sweeps.config import SweepConfig
from flows.sweeps.plan import SweepPlan
from tasks.training.tracking.metrics import metric_values

CONFIG_NAME = "sweep.json"

# Fields that may change when a sweep resumes: how it runs, but not its points.
_MAY_CHANGE = {"concurrency", "retries", "deployment", "cluster", "seeds", "prune"}


@dataclass(frozen=True, slots=True)
class SweepLog:
    """MLflow run of a sweep, and the runs of its trials."""

    tracking: MLflowTracking
    client: MlflowClient
    experiment_id: str
    run_id: str
    check_writer: Callable[[], None]

    def tags_of(self, sweep: str, point: int) -> dict[str, str]:
        """Return the tags of a trial's run."""
        return {"mlflow.parentRunId": self.run_id, "tinker_flows.sweep": sweep, "tinker_flows.point": str(point)}

    def find_run(self, run_name: str) -> Run | None:
        """Return the run of a trial; None before its start."""
        query = f"tags.`mlflow.parentRunId` = '{self.run_id}' and attributes.run_name = '{run_name}'"
        with self.tracking.failures():
            runs = self.client.search_runs([self.experiment_id], query, max_results=1)
        return runs[0] if runs else None

    def curve(self, run: Run | None, metric: str) -> list[tuple[int, float]]:
        """Return the logged values of a metric, sorted by step."""
        if run is None:
            return []
        with self.tracking.failures():
            return list(metric_values(self.client, run.info.run_id, metric).items())


def check_sweep(directory: RunDirectory, plan: SweepPlan) -> None:
    """Record the config of a new sweep; check that a resumed sweep has the same config.

    Raises:
        ConfigError: The name is in use by another sweep or by a run, or the recorded config is damaged.
    """
    if directory.read_bytes("config.json") is not None:
        raise ConfigError(
            f"The run name {plan.config.run_name!r} is in use by a run in {directory.location}: choose another one."
        )
    now = _as_recorded(plan.config, plan.base)
    recorded = directory.read_bytes(CONFIG_NAME)
    if recorded is None:
        directory.write_bytes(CONFIG_NAME, json.dumps(now, indent=2).encode())
        return
    try:
        # Validation fills in fields that later releases added.
        before = type(plan.config).model_validate_json(recorded)
    except ValidationError as error:
        raise ConfigError(
            f"{directory.location}/{CONFIG_NAME} is not the config of a sweep: restore it to resume the sweep."
        ) from error
    before = _as_recorded(before, before.base)
    changed = sorted(key for key in now.keys() | before.keys() if now.get(key) != before.get(key))
    if changed:
        raise ConfigError(
            f"The sweep {plan.config.run_name!r} was started with another {', '.join(changed)}: restore it or choose "
            f"another run_name; the first config is {directory.location}/{CONFIG_NAME}."
        )


@contextmanager
def open_sweep_log(plan: SweepPlan, directory: RunDirectory) -> Iterator[SweepLog]:
    """Open the MLflow run of a sweep."""
    tracking, config = tracking_of(plan.base_config), plan.config
    record = directory.location.encode() + (directory.read_bytes(CONFIG_NAME) or b"")
    with open_mlflow_run(
        tracking,
        config.run_name,
        hashlib.sha256(record).hexdigest(),
        params=config.model_dump(mode="json", exclude={"base"}),
        tags={"tinker_flows.sweep": config.run_name, "prefect.flow_run_id": flow_run.get_id() or ""},
        check_writer=directory.check_writer,
    ) as log:
        yield SweepLog(tracking, log.client, tracking.experiment_id(log.client), log.run_id, log.check_writer)


def last_values(run: Run | None) -> dict[str, float]:
    """Return the last value of every metric of a trial."""
    return dict(run.data.metrics) if run else {}


def log_best(log: SweepLog, point: int, mean: float, metric: str) -> None:
    """Log the best point and its mean on the sweep's run, so that MLflow can sort by it."""
    log.check_writer()
    with log.tracking.failures():
        log.client.log_metric(log.run_id, f"best/{metric}", mean)
        log.client.set_tag(log.run_id, "tinker_flows.best_point", str(point))


def _as_recorded(config: SweepConfig, base: Mapping[str, Any] | str) -> dict[str, Any]:
    fields = config.model_dump(mode="json", exclude=_MAY_CHANGE)
    fields["base"] = base  # the content, because the file may change
    fields.pop("fixed")  # part of the plan's base
    fields["search"].pop("num_points")  # may be raised to extend the sweep
    return json.loads(json.dumps(fields))
