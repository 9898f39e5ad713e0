"""Checkpoints as MLflow's logged models: parameters and tags of the run, and the metrics at the checkpoint's step."""

from __future__ import annotations

from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput, LoggedModelStatus
from mlflow.exceptions import MlflowException

from blocks.mlflow_internals import RESOURCE_DOES_NOT_EXIST, ErrorCode
from tasks.training.metrics import MetricsLog

# Field of a checkpoint's record with the ID of its logged model.
MODEL_ID = "mlflow_model_id"
MODEL_TYPE = "tinker"


def log_model(log: MetricsLog, name: str, step: int, tags: Mapping[str, str]) -> str:
    """Create the logged model of a checkpoint and return its ID; it gets the metrics that the run logs at the step.

    Args:
        name: name of the model; MLflow rejects some characters, such as dots and slashes.

    Raises:
        MlflowException: MLflow did not store it.
        LostRunError: Another process has taken over the run.
    """
    run = log.client.get_run(log.run_id)
    log.check_writer()
    model = log.client.create_logged_model(
        run.info.experiment_id,
        name=name,
        source_run_id=log.run_id,
        tags={**tags, "tinker_flows.step": str(step)},
        params=run.data.params,
        model_type=MODEL_TYPE,
    )
    log.client.log_outputs(log.run_id, [LoggedModelOutput(model.model_id, step)])
    log.client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    log.link(step, model.model_id)
    return model.model_id


def resume_model(log: MetricsLog, step: int, model_id: str) -> None:
    """Link the metrics of the checkpoint that a run resumes from to its logged model, unless that was done before."""
    if log.has_logged(step) and log.client.get_logged_model(model_id).metrics:
        return
    log.link(step, model_id)


def delete_model(client: MlflowClient, model_id: str) -> None:
    """Delete the logged model of a deleted checkpoint; a missing one is no error.

    Raises:
        MlflowException: MLflow did not delete it.
    """
    try:
        client.delete_logged_model(model_id)
    except MlflowException as error:
        if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            raise
