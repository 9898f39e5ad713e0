"""Status of stored runs, read from their checkpoint records, MLflow and the locks on their directories."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run as MlflowRun
from rich.table import Table

from blocks.errors import ConfigError, ServiceError, StorageError
from blocks.terminal import TextConsole, escape_terminal
from blocks.urls import hide_credentials
from deployments.run_lookup import StoredRun, find_mlflow_run, find_run
from flows.monitoring.run_tags import STOPPED_TAG as STOPPED
from flows.runs.blocks import storage_at
from tasks.reports.summary import run_warnings
from tasks.reports.tables import REWARD, format_figure
from tasks.training.checkpoints import read_records, step_of
from tasks.training.tracking.metric_names import logged_name
from tasks.training.tracking.metrics import metric_values

# Main metrics in order of preference, for runs that have not logged the metric of `keep_best`.
METRICS = (
    *("test/nll", "test/env/all/reward/total", "test/accuracy"),
    *("env/all/reward/total", "accuracy", "train_mean_nll", "loss/total"),
)
TEACHER_METRICS = ("test/teacher_kl", "teacher_kl")
# State of an unfinished run that no process is writing, by the status of its MLflow run.
STATES = {"FAILED": "failed", "KILLED": "stopped", "RUNNING": "killed", "FINISHED": "stopped"}

_NOTHING_LOGGED = "It ended before its MLflow run was created; its terminal and its Prefect flow run have the error."
_UNUSABLE = ("damaged", "unreadable")  # states of runs whose files cannot be used
_WRAPPED = ("metric", "written by")  # columns of the table whose cells may take several lines


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Status of one run; its fields are the keys of `--json`.

    Attributes:
        state: running, finished, stopped, failed, killed (ended without reporting), unknown (MLflow unreachable), or
            damaged (its config.json is invalid), unreadable (its files cannot be read).
        why: recorded reason for the end of the run, the MLflow error, or what is damaged; may be empty.
        step: number of steps that are logged to MLflow or contained in the newest checkpoint, whichever is more.
        num_steps: total steps of the run; None if unknown.
        checkpoint_step, checkpoint: step and path of the newest checkpoint, where a resumed run continues; None and
            empty without a checkpoint.
        metric, value, metric_step: name of the run's main metric, and its latest value with the step.
        writer: process, host and flow run that are writing to the run directory; empty if no process is.
        mlflow_run_id, mlflow: id of the MLflow run, and the URL of its page (the tracking URI without a server).
        flow_run_id: id of the newest Prefect flow run.
        directory: location of the run directory.
        warnings: sentences about warnings, guards, skipped evaluations, restarts and skipped terms.
    """

    run_name: str
    model: str
    state: str
    why: str
    directory: str
    step: int = 0
    num_steps: int | None = None
    checkpoint_step: int | None = None
    checkpoint: str = ""
    metric: str = ""
    value: float | None = None
    metric_step: int | None = None
    writer: str = ""
    mlflow_run_id: str = ""
    mlflow: str = ""
    flow_run_id: str = ""
    warnings: tuple[str, ...] = ()


def status_of(run: StoredRun) -> RunStatus:
    """Determine the status of a run.

    Raises:
        StorageError: the run directory cannot be read.
    """
    records = read_records(run.directory)
    newest = records.checkpoints[0] if records.checkpoints else None
    writer = run.directory.writer()
    mlflow_error, client, mlflow_run, page = "", None, None, ""
    try:
        client, mlflow_run = find_mlflow_run(run, records)
        page = _page(client.tracking_uri, mlflow_run) if mlflow_run else ""
    except ServiceError as error:
        mlflow_error = str(error)
    metrics: Mapping[str, float] = mlflow_run.data.metrics if mlflow_run else {}
    tags: Mapping[str, str] = mlflow_run.data.tags if mlflow_run else {}
    is_final = bool(newest and newest.final)
    checkpoint_step = step_of(newest) if newest else None
    num_steps = checkpoint_step if is_final else _num_steps(run, client, mlflow_run)
    # The final evaluation is logged as one more step after the last update, hence the minimum.
    step = min(int(metrics.get("progress/batch", -1)) + 1, sys.maxsize if num_steps is None else num_steps)
    metric = _main_metric(run, metrics)
    return RunStatus(
        run_name=run.name,
        model=str(run.fields.get("model", "")),
        state=_state(writer, is_final, mlflow_run, mlflow_error),
        why=tags.get(STOPPED, "") or mlflow_error or ("" if mlflow_run or newest or writer else _NOTHING_LOGGED),
        step=checkpoint_step if is_final and checkpoint_step is not None else max(step, checkpoint_step or 0),
        num_steps=num_steps,
        checkpoint_step=checkpoint_step,
        checkpoint=(newest.state_path or "") if newest else "",
        metric=metric,
        value=metrics.get(metric),
        metric_step=_newest_step(client, mlflow_run, metric) if client and mlflow_run and metric else None,
        writer=writer,
        mlflow_run_id=mlflow_run.info.run_id if mlflow_run else "",
        mlflow=page,
        flow_run_id=tags.get("prefect.flow_run_id", ""),
        directory=run.directory.location,
        warnings=_warnings(client, mlflow_run) if client and mlflow_run else (),
    )


def _status_or_damage(run_name: str, storage: str) -> RunStatus:
    """Return the status of a run, so that the list shows the other runs too if one is invalid or unreadable."""
    try:
        return status_of(find_run(run_name, storage))
    except (ConfigError, StorageError) as error:
        directory = storage_at(storage).run_directory(run_name).location
        state = "unreadable" if isinstance(error, StorageError) else "damaged"
        return RunStatus(run_name, model="", state=state, why=str(error), directory=directory)


def _warnings(client: MlflowClient, mlflow_run: MlflowRun) -> tuple[str, ...]:
    """Return the sentences that the report and the end of the run show too."""
    skipped = [key for key in mlflow_run.data.metrics if key.endswith("/skipped")]
    history = {key: list(metric_values(client, mlflow_run.info.run_id, key).items()) for key in skipped}
    return run_warnings(mlflow_run.data.tags, history)


def show_runs(storage: str, as_json: bool) -> None:
    """Print a table of all runs in a storage location."""
    names = storage_at(storage).run_names()
    runs = [_status_or_damage(name, storage) for name in names]
    if as_json:
        print(json.dumps([asdict(run) for run in runs], indent=2))
        return
    console = TextConsole()
    if not runs:
        console.print(f"No runs in {storage_at(storage).run_directory('RUN').location.removesuffix('/RUN')}.")
        return
    console.print(_table(runs, console.width))
    for message in dict.fromkeys(run.why for run in runs if run.state in ("unknown", *_UNUSABLE)):
        console.print(message)


def _table(runs: Sequence[RunStatus], width: int) -> Table:
    """Table of runs. Words are not broken.

    If the table does not fit, columns that `status RUN` shows too are left out, and names of metrics are shortened.
    """
    cells: dict[str, list[str]] = {
        "run": [run.run_name for run in runs],
        "state": [run.state for run in runs],
        "step": [_steps(run) for run in runs],
        "checkpoint": ["" if run.checkpoint_step is None else str(run.checkpoint_step) for run in runs],
        "metric": [_value(run, is_short=True) for run in runs],
        "MLflow run": [run.mlflow_run_id[:8] for run in runs],
        # Without the id of the flow run, which fills half of the row.
        "written by": [run.writer.partition(",")[0] for run in runs],
    }
    if not any(cells["written by"]):
        del cells["written by"]
    _fit(cells, width)
    widths = _widths(cells)
    for name in _WRAPPED:  # rich would shrink these columns alike, also below their longest words
        if name in cells:
            full_width = max(len(name), *map(len, cells[name]))
            widths[name] += max(0, min(_room(cells, width), full_width - widths[name]))
            width -= widths[name] - _widths(cells)[name]
    table = Table(title="Runs", title_justify="left")
    for name, columns in widths.items():
        justify = "right" if name in ("step", "checkpoint") else "left"
        table.add_column(
            name, overflow="fold", justify=justify, min_width=columns, max_width=columns, no_wrap=name not in _WRAPPED
        )
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    return table


def _widths(cells: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the narrowest width of each column in which no word is broken."""
    words = {name: " ".join([name, *column]).split() if name in _WRAPPED else column for name, column in cells.items()}
    return {name: max(len(name), *map(len, of_column)) for name, of_column in words.items()}


def _room(cells: Mapping[str, Sequence[str]], width: int) -> int:
    """Return how much narrower than a width a table can be."""
    widths = _widths(cells)
    return width - sum(widths.values()) - 3 * len(widths) - 1  # a border and two spaces for each column


def _fit(cells: dict[str, list[str]], width: int) -> None:
    """Leave out columns and shorten names of metrics, the least important first, until a table fits a width."""
    for name in ("MLflow run", "checkpoint"):
        if _room(cells, width) < 0:
            del cells[name]
    if _room(cells, width) < 0:
        cells["metric"] = [text.replace("env/all/", "") for text in cells["metric"]]
    if _room(cells, width) < 0:
        cells.pop("written by", None)
    if _room(cells, width) < 0:
        longest = _widths(cells)["metric"] + _room(cells, width)
        cells["metric"] = [" ".join(_shortened(word, longest) for word in text.split(" ")) for text in cells["metric"]]
    if _room(cells, width) < 0:
        del cells["metric"]


def _shortened(name: str, longest: int) -> str:
    """Return the longest end of a metric's name that fits; the last part of the name if none does.

    >>> _shortened("test/reward/total", 14), _shortened("test/reward/total", 10), _shortened("test/nll", 3)
    ('…/reward/total', '…/total', '…/nll')
    """
    parts = name.split("/")
    ends = [name, *(f"…/{'/'.join(parts[start:])}" for start in range(1, len(parts)))]
    return next((end for end in ends if len(end) <= longest), ends[-1])


def show_run(run_name: str, storage: str, as_json: bool) -> None:
    """Print the full status of one run."""
    run = status_of(find_run(run_name, storage))
    if as_json:
        print(json.dumps(asdict(run), indent=2))
        return
    checkpoint = "none" if run.checkpoint_step is None else f"step {run.checkpoint_step}, {run.checkpoint}"
    rows = {
        "state": f"{run.state}. {run.why}" if run.why else run.state,
        "model": run.model,
        "step": _steps(run),
        "last checkpoint": checkpoint,
        "metric": _value(run),
        "written by": run.writer or "no process",
        "MLflow": f"run {run.mlflow_run_id}, {run.mlflow}" if run.mlflow_run_id else "none",
        "Prefect flow run": run.flow_run_id,
        "run directory": run.directory,
    }
    print(escape_terminal(run_name))
    for name, value in rows.items():  # no table, which would break a path across lines
        print(escape_terminal(f"{name:<18}{value}").rstrip())
    for warning in run.warnings:
        print(escape_terminal(f"{'warning':<18}{warning}"))


def _state(writer: str, is_final: bool, mlflow_run: MlflowRun | None, mlflow_error: str) -> str:
    if writer:
        return "running"
    if is_final:
        return "finished"
    if mlflow_error:
        return "unknown"
    if mlflow_run is None:  # the run ended before it created an MLflow run
        return "failed"
    return STATES.get(mlflow_run.info.status, "stopped")


def _page(tracking_uri: str, mlflow_run: MlflowRun) -> str:
    page = f"/#/experiments/{mlflow_run.info.experiment_id}/runs/{mlflow_run.info.run_id}"
    return tracking_uri.rstrip("/") + page if tracking_uri.startswith("http") else hide_credentials(tracking_uri)


def _num_steps(run: StoredRun, client: MlflowClient | None, mlflow_run: MlflowRun | None) -> int | None:
    """Return the total number of steps, from the logged progress or the config; None if neither has it."""
    if client and mlflow_run and "progress/done_frac" in mlflow_run.data.metrics:
        history = client.get_metric_history(mlflow_run.info.run_id, "progress/done_frac")
        last = max(history, key=lambda point: point.step)
        return round((last.step + 1) / last.value)
    num_steps: Any = run.fields.get("num_steps")
    return num_steps if isinstance(num_steps, int) else None


def _main_metric(run: StoredRun, metrics: Mapping[str, float]) -> str:
    best = logged_name(str((run.fields.get("keep_best") or {}).get("metric", "")))
    # Distillation without rewards logs rewards of 0, which say nothing.
    teacher = () if metrics.get(REWARD) else TEACHER_METRICS
    return next((name for name in (best, *teacher, *METRICS) if name in metrics), "")


def _newest_step(client: MlflowClient, mlflow_run: MlflowRun, metric: str) -> int | None:
    return max(metric_values(client, mlflow_run.info.run_id, metric), default=None)


def _steps(run: RunStatus) -> str:
    if run.state in _UNUSABLE:
        return ""
    return f"{run.step} of {run.num_steps}" if run.num_steps is not None else str(run.step)


def _value(run: RunStatus, *, is_short: bool = False) -> str:
    """Name and value of the main metric, with its step; the short form leaves out the newest step."""
    if run.value is None:
        return ""
    # The batch of step s - 1 is trained on before the weights of step s are evaluated.
    is_newest = run.metric_step is None or run.metric_step >= run.step - 1
    step = "" if run.metric_step is None or (is_short and is_newest) else f" at step {run.metric_step}"
    return f"{run.metric} {format_figure(run.value)}{step}"
