"""Checkpoints as MLflow's logged models: parameters of the run, tags, and the metrics at the checkpoint's step."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus
from mlflow.exceptions import MlflowException

from blocks.mlflow_internals import RESOURCE_DOES_NOT_EXIST, ErrorCode
from tasks.training.tracking.metrics import MetricsLog

# Field of a checkpoint's record with the ID of its logged model.
MODEL_ID = "mlflow_model_id"
MODEL_TYPE = "tinker"
STEP_TAG = "tinker_flows.step"
# Characters that MLflow rejects in the name of a logged model.
_REJECTED = r"[/:.%\"']"


def log_model(log: MetricsLog, name: str, step: int, tags: Mapping[str, str], recorded: Collection[str] = ()) -> str:
    """Create the logged model of a checkpoint, with the metrics that the run logs at the step; return its ID.

    A process that is killed before it has recorded the checkpoint leaves a logged model without a record. The
    checkpoint that the resumed run saves at this step adopts that model.

    Args:
        name: name of the model; each character that MLflow rejects, such as a dot, becomes a hyphen.
        recorded: IDs of the logged models in the run's record, which belong to other checkpoints.

    Raises:
        MlflowException, ServiceError: MLflow did not store the model or its metrics.
        LostRunError: another process has taken over the run.
    """
    name = re.sub(_REJECTED, "-", name)
    run = log.client.get_run(log.run_id)
    all_tags = {**tags, STEP_TAG: str(step)}
    log.check_writer()
    orphan = _find_model(log, run.info.experiment_id, name, step, recorded)
    if orphan:
        log.client.set_logged_model_tags(orphan.model_id, all_tags)
    model = orphan or log.client.create_logged_model(
        run.info.experiment_id,
        name=name,
        source_run_id=log.run_id,
        tags=all_tags,
        params=run.data.params,
        model_type=MODEL_TYPE,
    )
    outputs = run.outputs.model_outputs if run.outputs else []
    if model.model_id not in {output.model_id for output in outputs}:
        log.client.log_outputs(log.run_id, [LoggedModelOutput(model.model_id, step)])
    if model.status != LoggedModelStatus.READY:
        log.client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    link_metrics(log, step, model.model_id)
    return model.model_id


def _find_model(
    log: MetricsLog, experiment_id: str, name: str, step: int, recorded: Collection[str]
) -> LoggedModel | None:
    """Return the logged model of this run, name and step that is in no record; None if there is none."""
    query = f"name = '{name}' AND source_run_id = '{log.run_id}'"
    models = log.client.search_logged_models([experiment_id], query)
    return next(
        (model for model in models if model.tags.get(STEP_TAG) == str(step) and model.model_id not in recorded), None
    )


def link_metrics(log: MetricsLog, step: int, model_id: str) -> None:
    """Link the metrics of a checkpoint's step to its logged model, unless an earlier process has linked them.

    Raises:
        MlflowException, ServiceError: MLflow did not store them.
    """
    is_logged = log.has_logged(step) and not log.may_repeat(step)
    if is_logged and log.client.get_logged_model(model_id).metrics:
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
