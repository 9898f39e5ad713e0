"""A sweep's record in its own directory and in MLflow, where its trials' runs are below its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Param, Run
from mlflow.exceptions import MlflowException
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run

from blocks import MLflowTracking
from blocks.errors import ConfigError, ServiceError
from blocks.storage import RunDirectory
from flows.blocks_of import tracking_of
from flows.stop import CancelledInTheUI
from flows.sweeps.plan import SweepPlan

CONFIG_NAME = "sweep.json"

# What may differ between the parts of one sweep: how it runs and how far, never what its points are.
_MAY_CHANGE = {"concurrency", "retries", "deployment", "cluster", "seeds", "prune"}


@dataclass(frozen=True, slots=True)
class SweepLog:
    """The MLflow run of a sweep, and those of its trials."""

    tracking: MLflowTracking
    client: MlflowClient
    experiment_id: str
    run_id: str

    def tags_of(self, sweep: str, point: int) -> dict[str, str]:
        """The tags of a trial's run."""
        return {"mlflow.parentRunId": self.run_id, "tinker_flows.sweep": sweep, "tinker_flows.point": str(point)}

    def trial(self, run_name: str) -> Run | None:
        """The run of a trial; None where it has not begun."""
        by = f"tags.`mlflow.parentRunId` = '{self.run_id}' and attributes.run_name = '{run_name}'"
        with self.tracking.failures():
            found = self.client.search_runs([self.experiment_id], by, max_results=1)
        return found[0] if found else None

    def curve(self, run: Run | None, metric: str) -> list[tuple[int, float]]:
        """What a trial has logged of a metric, by step."""
        if run is None:
            return []
        with self.tracking.failures():
            points = self.client.get_metric_history(run.info.run_id, metric)
        return sorted((point.step, point.value) for point in points)


def check_sweep(directory: RunDirectory, plan: SweepPlan) -> None:
    """Keep the config of a sweep, and hold every later start under its name to it.

    Raises:
        ConfigError: the name is in use by another sweep, or by a run.
    """
    if directory.read_bytes("config.json") is not None:
        raise ConfigError(
            f"The run name {plan.config.run_name!r} is that of a run, in {directory.location}: choose another run_name."
        )
    now = _as_recorded(plan)
    recorded = directory.read_bytes(CONFIG_NAME)
    if recorded is None:
        directory.write_bytes(CONFIG_NAME, json.dumps(now, indent=2).encode())
        return
    before = json.loads(recorded)
    changed = sorted(key for key in now.keys() | before.keys() if now.get(key) != before.get(key))
    if changed:
        raise ConfigError(
            f"The sweep {plan.config.run_name!r} was started with another {', '.join(changed)}: restore it or choose "
            f"another run_name; the first config is {directory.location}/{CONFIG_NAME}."
        )


@contextmanager
def open_sweep_log(plan: SweepPlan, directory: RunDirectory) -> Iterator[SweepLog]:
    """The sweep's one MLflow run, marked finished, failed or killed at the end."""
    tracking = tracking_of(plan.base_config)
    client = tracking.get_client()
    with tracking.failures():
        experiment = tracking.experiment_id(client)
        log = SweepLog(tracking, client, experiment, _mlflow_run(client, experiment, plan, directory))
        client.set_tag(log.run_id, "prefect.flow_run_id", flow_run.get_id() or "")
        client.update_run(log.run_id, status="RUNNING")
    status = "FAILED"
    try:
        yield log
        status = "FINISHED"
    except (KeyboardInterrupt, TerminationSignal, CancelledInTheUI):
        status = "KILLED"
        raise
    finally:
        with suppress(ServiceError), tracking.failures():
            client.set_terminated(log.run_id, status=status)


def last_values(run: Run | None) -> dict[str, float]:
    """The last value of every metric of a trial."""
    return dict(run.data.metrics) if run else {}


def log_best(log: SweepLog, point: int, mean: float, metric: str) -> None:
    """Put the best point and its mean on the sweep's run, where MLflow sorts by it."""
    with log.tracking.failures():
        log.client.log_metric(log.run_id, f"best/{metric}", mean)
        log.client.set_tag(log.run_id, "tinker_flows.best_point", str(point))


def _as_recorded(plan: SweepPlan) -> dict[str, Any]:
    fields = plan.config.model_dump(mode="json", exclude=_MAY_CHANGE)
    fields["base"] = dict(plan.base)  # not the path of a file that may change
    fields.pop("fixed")
    fields["search"].pop("num_points")
    return json.loads(json.dumps(fields))


def _mlflow_run(client: MlflowClient, experiment: str, plan: SweepPlan, directory: RunDirectory) -> str:
    """The run with this sweep's tag: made with it, so never made twice."""
    record = directory.location.encode() + (directory.read_bytes(CONFIG_NAME) or b"")
    tags = {"tinker_flows.record": hashlib.sha256(record).hexdigest(), "tinker_flows.sweep": plan.config.run_name}
    found = client.search_runs([experiment], f"tags.`tinker_flows.record` = '{tags['tinker_flows.record']}'")
    run = found[0] if found else client.create_run(experiment, run_name=plan.config.run_name, tags=tags)
    if not run.data.params:
        fields: Mapping[str, Any] = plan.config.model_dump(mode="json", exclude={"base"})
        with suppress(MlflowException):  # a sweep that goes on with another concurrency has its first params
            client.log_batch(run.info.run_id, params=[Param(key, str(value)[:6000]) for key, value in fields.items()])
    return run.info.run_id
