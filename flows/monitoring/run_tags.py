"""Tags and events of a run: reason of a stop, promotion, prices, evaluations, targets and warnings."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

from prefect.events import emit_event
from prefect.logging import get_run_logger
from prefect.logging.handlers import PrefectConsoleHandler
from tqdm import tqdm

from blocks.terminal import escape_terminal
from flows.monitoring.events import emit
from objectives.config.describe import first_line
from objectives.gradients.alerts import TermWarning
from objectives.term import Regularizer
from tasks.evaluation.evaluators import EvaluationResult
from tasks.reports.summary import STOPPED_TAG, TERM_TAG
from tasks.reports.tables import TargetRow
from tasks.training.batch_source import MetricWarning
from tasks.training.tracking.metric_names import safe_name
from tasks.training.tracking.metrics import MetricsLog

REJECTED_TAG = "tinker_flows.not_promoted"
DIFFERENCE_TAG = "tinker_flows.promotion.difference"
APPROVAL_TAG = "tinker_flows.approval"
REJECTED_EVENT = "tinker-flows.promotion.refused"
ACCEPTED_EVENT = "tinker-flows.contents.accepted"
EVALUATION_TAG = "tinker_flows.evaluation"
TARGET_TAG = "tinker_flows.target"
PRICES_TAG = "tinker_flows.prices"
WARNING_TAG = "tinker_flows.warning"
# Shape of a term's result in its docstring.
_SHAPE = re.compile(r",? ?``\((?:N|D),\)``|, 0-d")
# Name of a warning's figure in its event, by the kind of the warning.
_FIGURE_NAMES = {
    "dominance": "share",
    "idle": "share",
    "adverse": "effect",
    "conflict": "cosine",
    "target": "violation",
    "explosion": "margin",
    "chance": "accuracy",
    "length": "correlation",
}


def note_end(log: MetricsLog, reason: str) -> None:
    """Tag the run with the reason why it stopped before its last step."""
    log.tag(STOPPED_TAG, reason)


def note_terms(log: MetricsLog, terms: Sequence[Regularizer]) -> None:
    """Tag the run with the first line of the docstring of each term, which the report shows as its definition."""
    for term in terms:
        if definition := first_line(term.term):
            log.tag(f"{TERM_TAG}{safe_name(term.name)}", _SHAPE.sub("", definition).replace("``", ""))


def forget_end(log: MetricsLog) -> None:
    """Remove the stop reason when the run resumes."""
    _forget_tag(log, STOPPED_TAG)


def note_prices(log: MetricsLog, digest: str) -> None:
    """Tag the run with the digest of the prices that it is charged, or with `several` once the prices have changed."""
    log.check_writer()
    before = log.client.get_run(log.run_id).data.tags.get(PRICES_TAG, digest)
    log.tag(PRICES_TAG, digest if before == digest else "several")


def note_evaluation(log: MetricsLog, result: EvaluationResult, prefix: str = "", step: int | None = None) -> None:
    """Tag the run with the string metrics of an evaluation, and warn of skipped evaluators."""
    for name, text in result.texts.items():
        log.tag(f"{EVALUATION_TAG}.{prefix}{name}", text)
    for key, error in result.skipped.items():
        place = "" if step is None else f" at step {step}"
        note_warning(log, f"skipped.{prefix}{key}", f"An evaluation was skipped{place}. {error}")


def note_rejection(log: MetricsLog, run_name: str, model: str, reason: str) -> None:
    """Report that a checkpoint was not promoted: MLflow tag, log line, and event `tinker-flows.promotion.refused`."""
    log.tag(REJECTED_TAG, reason)
    get_run_logger().warning("%s", reason)
    resource = {"prefect.resource.id": f"tinker-flows.run.{run_name}", "prefect.resource.name": run_name}
    emit_event(REJECTED_EVENT, resource, payload={"model": model, "why": reason, "mlflow_run_id": log.run_id})


def note_difference(log: MetricsLog, text: str) -> None:
    """Report the difference from the baseline that decides on a promotion, if it is known: MLflow tag and log line."""
    if text:
        log.tag(DIFFERENCE_TAG, text)
        get_run_logger().info("%s", text)


def note_pending_approval(log: MetricsLog, reason: str) -> None:
    """Report that a person has to approve the promotion: log line, and the tag of a rejection until the approval."""
    log.tag(REJECTED_TAG, reason)
    get_run_logger().warning("%s", reason)


def forget_rejection(log: MetricsLog) -> None:
    """Remove the rejection of an earlier attempt."""
    _forget_tag(log, REJECTED_TAG)


def forget_approval(log: MetricsLog) -> None:
    """Remove the tag of an approval that was about an earlier checkpoint or is no longer required."""
    _forget_tag(log, APPROVAL_TAG)


def _forget_tag(log: MetricsLog, key: str) -> None:
    log.check_writer()
    if key in log.client.get_run(log.run_id).data.tags:
        log.client.delete_tag(log.run_id, key)


def emit_accepted_change(log: MetricsLog, run_name: str, change: Mapping[str, object]) -> None:
    """Emit the event `tinker-flows.contents.accepted` of a run that resumes with changed content."""
    resource = {"prefect.resource.id": f"tinker-flows.run.{run_name}", "prefect.resource.name": run_name}
    emit_event(ACCEPTED_EVENT, resource, payload={**change, "mlflow_run_id": log.run_id})


def note_targets(log: MetricsLog, rows: Sequence[TargetRow]) -> None:
    """Tag the run with the result of each target; log a warning for each target that it missed."""
    for row in rows:
        name, target, mean, multiplier, result = row.format()
        text = f"{result}: {target}, mean over the last quarter {mean}, multiplier {multiplier}"
        log.tag(f"{TARGET_TAG}.{name}", text)
        if result == "missed":
            get_run_logger().warning("The target of %r is %s.", name, text)


def note_warning(log: MetricsLog, key: str, text: str) -> None:
    """Show a warning in the terminal, the log of the flow run and the tag `tinker_flows.warning.<key>`.

    The end of the run, its report and `tinker-flows status` repeat the sentences of the tags.
    """
    escaped = escape_terminal(text)
    get_run_logger().warning("%s", escaped)
    log.tag(f"{WARNING_TAG}.{key}", escaped)
    if is_console_silent():
        tqdm.write(escape_terminal(f"warning: {text}"), file=sys.stderr)


def forget_warning(log: MetricsLog, key: str) -> None:
    """Remove a warning of an earlier start whose cause is gone."""
    _forget_tag(log, f"{WARNING_TAG}.{key}")


def is_console_silent() -> bool:
    """Return whether Prefect's log lines of the level WARNING stay out of the terminal."""
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, PrefectConsoleHandler)]
    return all(handler.level > logging.WARNING for handler in handlers)


def warn_of_metrics(
    log: MetricsLog, run_name: str, kind: Literal["health", "alert"], warnings: Sequence[MetricWarning]
) -> None:
    """Note and emit each warning; its tag is `tinker_flows.warning.<kind>.<check>`, its event `tinker-flows.<kind>`."""
    for warning in warnings:
        note_warning(log, f"{kind}.{safe_name(warning.check)}", warning.text)
        payload = {"step": warning.step, "check": warning.check, "figure": warning.figure, "message": warning.text}
        emit(kind, run_name, payload)


def warn_of_terms(log: MetricsLog, run_name: str, warnings: Sequence[TermWarning]) -> None:
    """Note and emit each warning; a later warning with the same kind and terms overwrites the tag."""
    for warning in warnings:
        note_warning(log, warning.key, warning.text)
        figure = {_FIGURE_NAMES[warning.kind]: warning.figure}
        emit(warning.kind, run_name, {"step": warning.step, "terms": warning.terms, **figure, "message": warning.text})
