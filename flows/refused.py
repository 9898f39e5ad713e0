"""A promotion that was refused: a tag of the MLflow run, an event in Prefect, a line of the log; and no error."""

from __future__ import annotations

from prefect.events import emit_event
from prefect.logging import get_run_logger

from tasks.metrics import MetricsLog

TAG = "tinker_flows.not_promoted"
EVENT = "tinker-flows.promotion.refused"


def note_refusal(log: MetricsLog, run_name: str, model: str, why: str) -> None:
    """Tell whoever looks, or listens, that a checkpoint did not become a version of a model.

    The event `tinker-flows.promotion.refused` is one that an automation of Prefect can act on.
    """
    log.tag(TAG, why)
    get_run_logger().warning("%s", why)
    resource = {"prefect.resource.id": f"tinker-flows.run.{run_name}", "prefect.resource.name": run_name}
    emit_event(EVENT, resource, payload={"model": model, "why": why, "mlflow_run_id": log.run_id})


def forget_refusal(log: MetricsLog) -> None:
    """Drop what an earlier part of the run said: by now it was promoted."""
    if TAG in log.client.get_run(log.run_id).data.tags:
        log.client.delete_tag(log.run_id, TAG)
