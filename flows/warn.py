"""Warnings of an objective: in the run's log, as tags of its MLflow run, and as events of its Prefect server."""

from __future__ import annotations

from collections.abc import Sequence

from prefect.logging import get_run_logger

from flows.events import emit
from objectives.watch import Warned
from tasks.metrics import MetricsLog

TAG = "tinker_flows.warning"
_FIGURES = {"dominance": "share", "conflict": "cosine", "explosion": "margin", "chance": "accuracy"}


def warn(log: MetricsLog, run_name: str, warnings: Sequence[Warned]) -> None:
    """Say each warning; the tag `tinker_flows.warning.<key>` keeps the last one of its kind and terms."""
    for warning in warnings:
        get_run_logger().warning("%s", warning.text)
        log.tag(f"{TAG}.{warning.key}", warning.text)
        figure = {_FIGURES.get(warning.kind, "correlation"): warning.figure}
        emit(warning.kind, run_name, {"step": warning.step, "terms": warning.terms, **figure, "message": warning.text})
