"""Result of a sweep: its report, its best config, and the statuses of its trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import yaml
from prefect.runtime import flow_run

from blocks.errors import ServiceError
from blocks.storage import RunDirectory
from blocks.urls import hide_credentials
from flows.runs.blocks import storage_of
from flows.sweeps.ablation import weighted_regularizers
from flows.sweeps.differences import compare_with_best
from flows.sweeps.plan import SweepPlan
from flows.sweeps.protocols import measured_config
from flows.sweeps.record import SweepLog, log_best
from objectives.config.aliases import renamed_attribute
from objectives.term_weights.schedule import WeightSchedule
from tasks.sweeps.report import SweepSummary, write_sweep_report
from tasks.sweeps.store import Point, Trials
from tasks.sweeps.table import PointRow, point_rows, row_cells, table_columns
from tasks.training.held_out import BatchValues, read_batch_values
from tasks.training.tracking.metric_names import logged_name

__getattr__ = partial(renamed_attribute, "flows.sweeps.result")  # names of release 0.1

BEST_NAME = "best.yaml"
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Result of a finished sweep.

    Attributes:
        run_name: Name of the sweep.
        num_points: Number of points tried.
        num_completed, num_pruned, num_failed: Number of trials by status.
        best_point, best_value: Best point, and the mean of its metric over the seeds.
        best_config: Path of the best point's config file.
        directory, report: Paths of the sweep's record and report.
        columns, rows: Table of the best points.
        flow_run_id: Prefect flow run that finished the sweep.
        tracking_uri, experiment_id, mlflow_run_id: MLflow run of the sweep, the parent of the trials' runs.
    """

    run_name: str
    num_points: int
    num_completed: int
    num_pruned: int
    num_failed: int
    best_point: int
    best_value: float
    best_config: str
    directory: str
    report: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    flow_run_id: str
    tracking_uri: str
    experiment_id: str
    mlflow_run_id: str


def finish_sweep(plan: SweepPlan, directory: RunDirectory, log: SweepLog, trials: Trials) -> SweepResult:
    """Write the best config and the report of a sweep.

    Raises:
        ServiceError: No point has completed trials for all seeds; the report is written before.
    """
    config, metric = plan.config, logged_name(plan.config.metric)
    # The seeds of a resumed sweep may be fewer than before.
    finished = {key: trial for key, trial in trials.finished.items() if trial.seed in config.seeds}
    trials = Trials(trials.points, finished)
    rows = point_rows(trials, config.seeds, metric, config.mode)
    best = rows[0] if rows and rows[0].is_complete else None
    best_config = _write_best(plan, directory, best) if best else None
    summary = SweepSummary(
        run_name=config.run_name,
        metric=metric,
        mode=config.mode,
        trials=trials,
        rows=rows,
        strengths={point.number: _strengths(plan, point) for point in trials.points},
        differences=[
            difference.cells() for difference in compare_with_best(rows, _scores(plan, trials, metric), config.mode)
        ],
        best_config=best_config,
    )
    report = write_sweep_report(directory, log.client, log.run_id, summary)
    if best is None or best.mean is None:
        raise ServiceError(_no_complete_point(plan, trials, report))
    log_best(log, best.point.number, best.mean, metric)
    statuses = [trial.status for trial in trials.finished.values()]
    return SweepResult(
        run_name=config.run_name,
        num_points=len(trials.points),
        num_completed=statuses.count("completed"),
        num_pruned=statuses.count("pruned"),
        num_failed=statuses.count("failed"),
        best_point=best.point.number,
        best_value=best.mean,
        best_config=f"{directory.location}/{BEST_NAME}",
        directory=directory.location,
        report=report,
        columns=table_columns(rows, metric),
        rows=[row_cells(row, rows) for row in rows[:_SHOWN]],
        flow_run_id=flow_run.get_id() or "",
        tracking_uri=hide_credentials(log.client.tracking_uri),
        experiment_id=log.experiment_id,
        mlflow_run_id=log.run_id,
    )


def _write_best(plan: SweepPlan, directory: RunDirectory, best: PointRow) -> str:
    """Write the config of the best point as YAML; a header comment shows the command to run it."""
    config = plan.config
    fields = plan.fields_of(best.point.values, f"{config.run_name}-best", config.seeds[0])
    header = f"# The best of {config.run_name}: point {best.point.number}, {config.metric} {best.mean:.6g}.\n"
    command = f"#   python -m flows.{config.flow} --config {BEST_NAME}\n" if ":" not in config.flow else ""
    text = header + command + yaml.safe_dump(fields, sort_keys=False)
    directory.write_bytes(BEST_NAME, text.encode())
    return text


def _scores(plan: SweepPlan, trials: Trials, metric: str) -> dict[tuple[int, int], BatchValues]:
    """Read the scores of each problem in the last evaluation of the completed trials, if the metric has such scores."""
    scores: dict[tuple[int, int], BatchValues] = {}
    storage = storage_of(plan.base_config)
    for key, trial in trials.finished.items():
        if trial.status != "completed":
            continue
        by_step = read_batch_values(storage.run_directory(plan.measured_run(trial.run_name)))
        measured = [by_step[step][metric] for step in sorted(by_step) if metric in by_step[step]]
        if measured:
            scores[key] = measured[-1]
    return scores


def _strengths(plan: SweepPlan, point: Point) -> dict[str, float]:
    """Return the maximum weight of each regularizer during a run of a point; 0 for ablated ones, 1 with a target."""
    base = {spec.name: 0.0 for spec in measured_config(plan.base_config).objective.regularizers if spec.enabled}
    objective = measured_config(plan.config_of(point.values, plan.trial_name(point.number, 0), 0)).objective
    return base | {
        regularizer.name: _max_weight(regularizer.weight) for regularizer in weighted_regularizers(objective)
    }


def _max_weight(weight: WeightSchedule | None) -> float:
    if weight is None:  # The weight of a target is a result; its limit is a dimension of the sweep.
        return 1.0
    fields = weight.model_dump()
    return max(fields[key] for key in ("value", "start", "end") if key in fields)


def _no_complete_point(plan: SweepPlan, trials: Trials, report: str) -> str:
    reasons = [trial.reason for trial in trials.finished.values() if trial.status == "failed"]
    first = f" (first failure: {reasons[0]})" if reasons else ""
    return (
        f"No point of {plan.config.run_name!r} has completed trials for all seeds{first}: see {report}, fix the cause, "
        "and run the same command again; completed trials are not repeated."
    )
