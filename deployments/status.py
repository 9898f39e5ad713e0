"""What the runs of a storage have become, from their records, MLflow, and who holds them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run as MlflowRun
from rich.console import Console
from rich.table import Table

from blocks.errors import ServiceError
from deployments.recorded_run import RecordedRun, mlflow_run_of, recorded_run
from flows.blocks_of import storage_at
from flows.ended import TAG as STOPPED
from tasks.checkpoint import read_records, step_of

# The first of them that a run has is shown; what `keep_best` watches comes before.
METRICS = ("test/nll", "env/all/reward/total", "accuracy", "train_mean_nll", "loss/total")
STATES = {"FAILED": "failed", "KILLED": "stopped", "RUNNING": "killed", "FINISHED": "stopped"}


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One run.

    Attributes:
        state: running, finished, stopped, failed, killed (it left no word), or unknown, where MLflow cannot be asked.
        why: the sentence it ended with, as far as one is kept.
        step: the updates that MLflow knows of.
        num_steps: of the whole run; None where nothing tells.
        checkpoint_step, checkpoint: the newest checkpoint, where a resume goes on; None and empty for none.
        metric, value: how good it is by now.
        writer: who writes it now: process, host, flow run; empty where nobody does.
        mlflow_run_id, mlflow: its MLflow run, and the page or the tracking URI that has it.
        flow_run_id: the Prefect flow run of its last part.
        directory: its record.
    """

    run_name: str
    model: str
    state: str
    why: str
    step: int
    num_steps: int | None
    checkpoint_step: int | None
    checkpoint: str
    metric: str
    value: float | None
    writer: str
    mlflow_run_id: str
    mlflow: str
    flow_run_id: str
    directory: str


def status_of(run: RecordedRun) -> RunStatus:
    """What a run has become.

    Raises:
        StorageError: its record cannot be read.
    """
    records = read_records(run.directory)
    newest = records.checkpoints[0] if records.checkpoints else None
    writer = run.directory.holder()
    trouble, client, found, page = "", None, None, ""
    try:
        client, found = mlflow_run_of(run, records)
        page = _page(client.tracking_uri, found) if found else ""
    except ServiceError as error:
        trouble = str(error)
    metrics: Mapping[str, float] = found.data.metrics if found else {}
    tags: Mapping[str, str] = found.data.tags if found else {}
    final = bool(newest and newest.final)
    at = step_of(newest) if newest else None
    num_steps = at if final else _num_steps(run, client, found)
    # The last evaluation is logged at the step behind the last one.
    step = min(int(metrics.get("progress/batch", -1)) + 1, sys.maxsize if num_steps is None else num_steps)
    metric = _metric(run, metrics)
    return RunStatus(
        run_name=run.name,
        model=str(run.fields.get("model", "")),
        state=_state(writer, final, found, trouble),
        why=tags.get(STOPPED, "") or trouble,
        step=at if final and at is not None else max(step, at or 0),
        num_steps=num_steps,
        checkpoint_step=at,
        checkpoint=(newest.state_path or "") if newest else "",
        metric=metric,
        value=metrics.get(metric),
        writer=writer,
        mlflow_run_id=found.info.run_id if found else "",
        mlflow=page,
        flow_run_id=tags.get("prefect.flow_run_id", ""),
        directory=run.directory.location,
    )


def show_runs(storage: str, as_json: bool) -> None:
    """Print every run of a storage."""
    names = storage_at(storage).run_names()
    found = [status_of(recorded_run(name, storage)) for name in names]
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    if not found:
        console.print(f"There are no runs in {storage_at(storage).run_directory('RUN').location.removesuffix('/RUN')}.")
        return
    table = Table(title="Runs", title_justify="left")
    for column in ("run", "state", "step", "checkpoint", "metric", "MLflow run", "written by"):
        table.add_column(column, overflow="fold", justify="right" if column in ("step", "checkpoint") else "left")
    for each in found:
        at = "" if each.checkpoint_step is None else str(each.checkpoint_step)
        table.add_row(each.run_name, each.state, _steps(each), at, _value(each), each.mlflow_run_id[:8], each.writer)
    console.print(table)
    for sentence in dict.fromkeys(each.why for each in found if each.state == "unknown"):
        console.print(sentence)


def show_run(run_name: str, storage: str, as_json: bool) -> None:
    """Print all that is known of one run."""
    found = status_of(recorded_run(run_name, storage))
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return
    table = Table(title=run_name, title_justify="left", show_header=False)
    at = "none" if found.checkpoint_step is None else f"step {found.checkpoint_step}, {found.checkpoint}"
    rows = {
        "state": f"{found.state}. {found.why}" if found.why else found.state,
        "model": found.model,
        "step": _steps(found),
        "last checkpoint": at,
        "metric": _value(found),
        "written by": found.writer or "nobody",
        "MLflow": f"run {found.mlflow_run_id}, {found.mlflow}" if found.mlflow_run_id else "none",
        "Prefect flow run": found.flow_run_id,
        "record": found.directory,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False, soft_wrap=True).print(table)


def _state(writer: str, final: bool, found: MlflowRun | None, trouble: str) -> str:
    if writer:
        return "running"
    if final:
        return "finished"
    if trouble:
        return "unknown"
    return STATES.get(found.info.status, "stopped") if found else "failed"  # it ended before it had an MLflow run


def _page(tracking_uri: str, found: MlflowRun) -> str:
    page = f"/#/experiments/{found.info.experiment_id}/runs/{found.info.run_id}"
    return tracking_uri.rstrip("/") + page if tracking_uri.startswith("http") else tracking_uri


def _num_steps(run: RecordedRun, client: MlflowClient | None, found: MlflowRun | None) -> int | None:
    """By how much of the run its last step was; before the first one, what the config says."""
    if client and found and "progress/done_frac" in found.data.metrics:
        last = max(client.get_metric_history(found.info.run_id, "progress/done_frac"), key=lambda each: each.step)
        return round((last.step + 1) / last.value)
    wanted: Any = run.fields.get("num_steps")
    return wanted if isinstance(wanted, int) else None


def _metric(run: RecordedRun, metrics: Mapping[str, float]) -> str:
    best = str((run.fields.get("keep_best") or {}).get("metric", ""))
    return next((name for name in (best, *METRICS) if name in metrics), "")


def _steps(found: RunStatus) -> str:
    return f"{found.step} of {found.num_steps}" if found.num_steps is not None else str(found.step)


def _value(found: RunStatus) -> str:
    return f"{found.metric} {found.value:.4g}" if found.value is not None else ""
