"""What a finished run leaves, whatever its method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from prefect.runtime import flow_run
from prefect.states import Completed
from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks.errors import StorageError
from flows.run import Run
from tasks.checkpoint import step_of
from tasks.report import write_report


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a finished run leaves.

    Attributes:
        run_name: the run's name.
        num_steps: the updates its weights hold.
        resumed_from: the step this part of the run started at; 0 for a run never interrupted.
        state_path: tinker:// path of the final weights and optimizer.
        sampler_path: tinker:// path of the final weights for sampling; empty where it ended before.
        directory: where the run's record is.
        report: where its report is.
        flow_run_id: the Prefect flow run of this part of the run.
        tracking_uri, experiment_id, mlflow_run_id: its MLflow run.
        metrics: the last value of every metric.
        stopped: why it ended before its last step, by its budget; empty where it did not.
        not_promoted: why `promote_if` kept its checkpoint from being registered; empty where it did not.
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
    stopped: str = ""
    not_promoted: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a run did not come to, in a sentence each; empty where it did.

    Attributes:
        stopped: why it ended before its last step, by its budget.
        not_promoted: why no checkpoint of it was registered.
    """

    stopped: str = ""
    not_promoted: str = ""


def finish(run: Run, run_name: str, last: CheckpointRecord, first: int, ended: Ended) -> TrainResult:
    """Write the report and sum up the run.

    Raises:
        StorageError: the last record is not that of a finished run.
    """
    if not last.state_path or not (last.sampler_path or ended.stopped):
        raise StorageError(
            f"The last record in {run.directory.location}/checkpoints.jsonl is at the run's last step but not final: "
            "choose another run_name, or remove that line to train its steps again."
        )
    run.log.flush()
    history = run.log.history()
    return TrainResult(
        run_name=run_name,
        num_steps=step_of(last),
        resumed_from=first,
        state_path=last.state_path,
        sampler_path=last.sampler_path or "",
        directory=run.directory.location,
        report=write_report(run.directory, run.log, run_name, history, ended.not_promoted),
        flow_run_id=flow_run.get_id() or "",
        tracking_uri=run.log.client.tracking_uri,
        experiment_id=run.log.client.get_run(run.log.run_id).info.experiment_id,
        mlflow_run_id=run.log.run_id,
        metrics={key: points[-1][1] for key, points in history.items()},
        stopped=ended.stopped,
        not_promoted=ended.not_promoted,
    )


def as_state(result: TrainResult) -> TrainResult:
    """What a flow returns: the result, for Prefect in a state that says what the run did not come to."""
    if result.stopped:
        return cast(TrainResult, Completed(name="BudgetSpent", message=result.stopped, data=result))
    if result.not_promoted:
        return cast(TrainResult, Completed(name="NotPromoted", message=result.not_promoted, data=result))
    return result
