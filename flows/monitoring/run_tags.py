"""Tags of the MLflow run: reason of a stop, rejected promotion, warnings."""

from __future__ import annotations

from collections.abc import Sequence

from prefect.events import emit_event
from prefect.logging import get_run_logger

from flows.monitoring.events import emit
from objectives.gradients.alerts import TermWarning
from tasks.evaluation.evaluators import EvaluationResult
from tasks.reports.summary import STOPPED_TAG
from tasks.reports.tables import TargetRow
from tasks.training.metrics import MetricsLog

REJECTED_TAG = "tinker_flows.not_promoted"
REJECTED_EVENT = "tinker-flows.promotion.refused"
EVALUATION_TAG = "tinker_flows.evaluation"
SKIPPED_TAG = "tinker_flows.skipped"
TARGET_TAG = "tinker_flows.target"
WARNING_TAG = "tinker_flows.warning"
_FIGURES = {
    "dominance": "share",
    "idle": "share",
    "adverse": "effect",
    "conflict": "cosine",
    "target": "violation",
    "explosion": "margin",
    "chance": "accuracy",
}


def note_end(log: MetricsLog, reason: str) -> None:
    """Tag the run with the reason why it stopped before its last step."""
    log.tag(STOPPED_TAG, reason)


def forget_end(log: MetricsLog) -> None:
    """Remove the stop reason when the run resumes."""
    if STOPPED_TAG in log.client.get_run(log.run_id).data.tags:
        log.client.delete_tag(log.run_id, STOPPED_TAG)


def note_evaluation(log: MetricsLog, result: EvaluationResult, prefix: str = "", step: int | None = None) -> None:
    """Tag the run with the string metrics of an evaluation and with the errors of skipped evaluators."""
    for name, text in result.texts.items():
        log.tag(f"{EVALUATION_TAG}.{prefix}{name}", text)
    for key, error in result.skipped.items():
        log.tag(f"{SKIPPED_TAG}.{prefix}{key}", error if step is None else f"Step {step}: {error}")


def note_rejection(log: MetricsLog, run_name: str, model: str, reason: str) -> None:
    """Report that a checkpoint was not promoted: MLflow tag, log line, and event `tinker-flows.promotion.refused`."""
    log.tag(REJECTED_TAG, reason)
    get_run_logger().warning("%s", reason)
    resource = {"prefect.resource.id": f"tinker-flows.run.{run_name}", "prefect.resource.name": run_name}
    emit_event(REJECTED_EVENT, resource, payload={"model": model, "why": reason, "mlflow_run_id": log.run_id})


def forget_rejection(log: MetricsLog) -> None:
    """Remove the rejection of an earlier attempt once the checkpoint is promoted."""
    if REJECTED_TAG in log.client.get_run(log.run_id).data.tags:
        log.client.delete_tag(log.run_id, REJECTED_TAG)


def note_targets(log: MetricsLog, rows: Sequence[TargetRow]) -> None:
    """Tag the run with the result of each target; log a warning for each target that it missed."""
    for row in rows:
        name, target, mean, multiplier, result = row.format()
        text = f"{result}: {target}, mean over the last quarter {mean}, multiplier {multiplier}"
        log.tag(f"{TARGET_TAG}.{name}", text)
        if result == "missed":
            get_run_logger().warning("Term %r %s.", name, text)


def warn(log: MetricsLog, run_name: str, warnings: Sequence[TermWarning]) -> None:
    """Log and emit each warning; the tag `tinker_flows.warning.<key>` keeps the last one of its kind and terms."""
    for warning in warnings:
        get_run_logger().warning("%s", warning.text)
        log.tag(f"{WARNING_TAG}.{warning.key}", warning.text)
        figure = {_FIGURES.get(warning.kind, "correlation"): warning.figure}
        emit(warning.kind, run_name, {"step": warning.step, "terms": warning.terms, **figure, "message": warning.text})
