"""What a sweep leaves: its report, its best config, and how its trials ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import yaml
from prefect.runtime import flow_run

from blocks.errors import ServiceError
from blocks.storage import RunDirectory
from flows.sweeps.ablation import weighted_of
from flows.sweeps.plan import SweepPlan
from flows.sweeps.record import SweepLog, log_best
from objectives.schedule import WeightSchedule
from tasks.sweep_report import SweepSummary, write_sweep_report
from tasks.sweep_table import PointRow, columns_of, point_rows, row_cells
from tasks.trials import Point, Trials

BEST_NAME = "best.yaml"
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a finished sweep leaves.

    Attributes:
        run_name: the sweep's name.
        num_points: how many places of the space were tried.
        num_completed, num_pruned, num_failed: how their trials ended.
        best_point, best_value: the best point, and the mean of the metric over its seeds.
        best_config: the config of that point, as a file that the flow runs.
        directory, report: where the record and the report are.
        columns, rows: the table of the best points.
        flow_run_id: the Prefect flow run of this part of the sweep.
        tracking_uri, experiment_id, mlflow_run_id: its MLflow run, which those of the trials are below.
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


def conclude(plan: SweepPlan, directory: RunDirectory, log: SweepLog, trials: Trials) -> SweepResult:
    """Write the best config and the report.

    Raises:
        ServiceError: no point has a trial of each seed that completed; the report is written all the same.
    """
    config = plan.config
    rows = point_rows(trials, config.seeds, config.metric, config.mode)
    best = rows[0] if rows and rows[0].is_complete else None
    best_config = _write_best(plan, directory, best) if best else None
    summary = SweepSummary(
        run_name=config.run_name,
        metric=config.metric,
        mode=config.mode,
        trials=trials,
        rows=rows,
        strengths={point.number: _strengths(plan, point) for point in trials.points},
        best_config=best_config,
    )
    report = write_sweep_report(directory, log.client, log.run_id, summary)
    if best is None or best.mean is None:
        raise ServiceError(_nothing_completed(plan, trials, report))
    log_best(log, best.point.number, best.mean, config.metric)
    statuses = [trial.status for trial in trials.ended.values()]
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
        columns=columns_of(rows, config.metric),
        rows=[row_cells(row, rows) for row in rows[:_SHOWN]],
        flow_run_id=flow_run.get_id() or "",
        tracking_uri=log.client.tracking_uri,
        experiment_id=log.experiment_id,
        mlflow_run_id=log.run_id,
    )


def _write_best(plan: SweepPlan, directory: RunDirectory, best: PointRow) -> str:
    """The config of the best point, as YAML, with a head that says how to run it."""
    config = plan.config
    fields = plan.fields_of(best.point.values, f"{config.run_name}-best", config.seeds[0])
    head = f"# The best of {config.run_name}: point {best.point.number}, {config.metric} {best.mean:.6g}.\n"
    how = f"#   python -m flows.{config.flow} --config {BEST_NAME}\n" if ":" not in config.flow else ""
    text = head + how + yaml.safe_dump(fields, sort_keys=False)
    directory.write_bytes(BEST_NAME, text.encode())
    return text


def _strengths(plan: SweepPlan, point: Point) -> dict[str, float]:
    """The greatest weight of each regularizer over a run of a point; 0 for one that is left out."""
    every = {each.name: 0.0 for each in plan.base_config.objective.regularizers if each.enabled}
    spec = plan.config_of(point.values, plan.trial_name(point.number, 0), 0).objective
    return every | {each.name: _greatest(each.weight) for each in weighted_of(spec)}


def _greatest(weight: WeightSchedule) -> float:
    fields = weight.model_dump()
    return max(fields[key] for key in ("value", "start", "end") if key in fields)


def _nothing_completed(plan: SweepPlan, trials: Trials, report: str) -> str:
    reasons = [trial.reason for trial in trials.ended.values() if trial.status == "failed"]
    first = f" (the first one that failed: {reasons[0]})" if reasons else ""
    return (
        f"No point of {plan.config.run_name!r} has a trial of each seed that completed{first}: see {report}, mend "
        "that, and start the same command again; what completed stays."
    )
