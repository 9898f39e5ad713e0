"""Metrics of a finished run, as MLflow has them."""

from __future__ import annotations

from mlflow import MlflowClient

from flows.evaluate import EvaluateResult
from flows.runs.result import TrainResult


def history(result: TrainResult | EvaluateResult, key: str) -> dict[int, float]:
    """Return the values of a metric by step, in the order of the steps."""
    points = MlflowClient(result.tracking_uri).get_metric_history(result.mlflow_run_id, key)
    return {point.step: point.value for point in sorted(points, key=lambda point: point.step)}


def curve(result: TrainResult, key: str) -> list[float]:
    """Return the values of a metric in the order of the steps."""
    return list(history(result, key).values())
