"""Warnings of an objective's watch: in the run's log, and as tags of its MLflow run."""

from __future__ import annotations

from collections.abc import Sequence

from prefect.logging import get_run_logger

from objectives.watch import Warned
from tasks.metrics import MetricsLog

TAG = "tinker_flows.warning"


def warn(log: MetricsLog, warnings: Sequence[Warned]) -> None:
    """Say each warning; the tag `tinker_flows.warning.<key>` keeps the last one of its kind and terms."""
    for warning in warnings:
        get_run_logger().warning("%s", warning.text)
        log.tag(f"{TAG}.{warning.key}", warning.text)
