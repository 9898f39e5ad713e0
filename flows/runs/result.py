"""Result of a run, for every method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from prefect.assets import Asset
from prefect.runtime import flow_run
from prefect.states import Completed
from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks.errors import StorageError
from blocks.urls import hide_credentials
from flows.monitoring.run_tags import note_targets
from flows.runs.checkpoints.approval import ApprovalRequest
from flows.runs.checkpoints.checkpoint_refs import checkpoint_key
from flows.runs.run import Run
from flows.runs.start.resume import origin_step
from objectives.term_weights.targets import TargetSpec
from tasks.common.assets import asset_key, materialize
from tasks.reports.run_report import ReportExtras, write_report
from tasks.reports.summary import run_warnings
from tasks.reports.tables import HeldOutRow, TermRow, held_out_rows, recent_term_rows, target_rows
from tasks.training.checkpoints import step_of
from tasks.training.held_out import read_batch_values


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of a finished run.

    Attributes:
        run_name: Name of the run.
        num_steps: Number of steps whose updates the final weights contain.
        resumed_from: First step of the last start; 0 for an uninterrupted run, the step of the checkpoint for an
            uninterrupted fork.
        state_path: tinker:// path of the final weights and optimizer state.
        sampler_path: tinker:// path of the final weights for sampling; empty if the run stopped early.
        directory: Location of the run's record.
        report: Location of the run's report.
        flow_run_id: Prefect flow run of the last start.
        tracking_uri, experiment_id, mlflow_run_id: MLflow run.
        metrics: Last value of every metric.
        terms_title, terms: Means of each term's figures over the last quarter of the steps.
        warnings: Sentences about warnings, guards, skipped evaluations and restarts.
        held_out: Metrics of the held-out data at the first and the last evaluation.
        stopped: Reason why the budget stopped the run before its last step; empty if it did not.
        not_promoted: Reason why `promote_if` or a person prevented registration; empty if neither did.
        approval_request: Question that a person has to answer before the registration; None without one.
        origin_step: First step of the run: 0, or the step of the checkpoint that it was forked from.
    """

    run_name: str
    num_steps: int
    resumed_from: int
    state_path: str
    sampler_path: str
    directory: str
    report: str
    flow_run_id: str
    tracking_uri: str
    experiment_id: str
    mlflow_run_id: str
    metrics: dict[str, float]
    terms_title: str = ""
    terms: tuple[TermRow, ...] = ()
    warnings: tuple[str, ...] = ()
    held_out: tuple[HeldOutRow, ...] = ()
    stopped: str = ""
    not_promoted: str = ""
    approval_request: ApprovalRequest | None = None
    origin_step: int = 0


@dataclass(frozen=True, slots=True)
class EndReasons:
    """Reasons why a run did not finish or was not registered: one sentence each, empty if the reason does not apply.

    Attributes:
        stopped: Reason why the budget stopped the run before its last step.
        not_promoted: Reason why no checkpoint was registered.
        approval_request: Question that a person has to answer before the registration; None without one.
    """

    stopped: str = ""
    not_promoted: str = ""
    approval_request: ApprovalRequest | None = None


def finish(
    run: Run,
    run_name: str,
    last: CheckpointRecord,
    first: int,
    reasons: EndReasons,
    targets: Mapping[str, TargetSpec],
) -> TrainResult:
    """Write the report, tag the MLflow run with the results of the targets, and return the result of a run.

    Args:
        last: Last checkpoint record.
        first: First step of the last start.
        targets: Targets of terms and rewards by the prefix of their metrics.

    Raises:
        StorageError: The last record does not belong to a finished run.
    """
    if not last.state_path or not (last.sampler_path or reasons.stopped):
        raise StorageError(
            f"The last record in {run.directory.location}/checkpoints.jsonl is at the run's last step but not final: "
            "choose another run_name, or remove that line to train its steps again."
        )
    run.log.flush()
    history = run.log.history()
    rows = target_rows(history, targets)
    note_targets(run.log, rows)
    mlflow_run = run.log.client.get_run(run.log.run_id)
    location = run.directory.location
    title, terms = recent_term_rows(history)
    key, checkpoint = asset_key(f"{location}/report.html"), Asset(key=checkpoint_key(location, last.name))
    report = materialize(write_report, key, [checkpoint], lambda _: {"mlflow_run_id": run.log.run_id})
    return TrainResult(
        run_name=run_name,
        num_steps=step_of(last),
        resumed_from=first,
        state_path=last.state_path,
        sampler_path=last.sampler_path or "",
        directory=location,
        report=report(run.directory, run.log, run_name, history, ReportExtras(reasons.not_promoted, rows)),
        flow_run_id=flow_run.get_id() or "",
        tracking_uri=hide_credentials(run.log.client.tracking_uri),
        experiment_id=mlflow_run.info.experiment_id,
        mlflow_run_id=run.log.run_id,
        metrics={key: points[-1][1] for key, points in history.items()},
        terms_title=title,
        terms=tuple(terms),
        warnings=run_warnings(mlflow_run.data.tags, history),
        held_out=tuple(held_out_rows(history, read_batch_values(run.directory))),
        stopped=reasons.stopped,
        not_promoted=reasons.not_promoted,
        approval_request=reasons.approval_request,
        origin_step=origin_step(run.directory),
    )


class _FlowResult(Protocol):
    @property
    def stopped(self) -> str: ...

    @property
    def not_promoted(self) -> str: ...


R = TypeVar("R", bound=_FlowResult)


def as_state(result: R) -> R:
    """Wrap a flow's result in the Prefect state BudgetSpent or NotPromoted if its run ended so."""
    if result.stopped:
        return cast(R, Completed(name="BudgetSpent", message=result.stopped, data=result))
    if result.not_promoted:
        return cast(R, Completed(name="NotPromoted", message=result.not_promoted, data=result))
    return result
