"""Promotion of checkpoints to model versions in MLflow's registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from prefect.assets import Asset

from blocks.errors import ServiceError, reason
from blocks.mlflow_internals import RESOURCE_ALREADY_EXISTS, ErrorCode
from tasks.common.assets import asset_key, materialize
from tasks.common.task import call, retried_task
from tasks.training.tracking.logged_models import STEP_TAG, log_model
from tasks.training.tracking.metrics import MetricsLog

STATE_TAG = "tinker.state_path"
# Tag of a run that names the version that the run promoted last.
VERSION_TAG = "tinker_flows.version"


@dataclass(frozen=True, slots=True)
class Promotion:
    """Checkpoint to promote.

    Attributes:
        alias: alias of the model version: `best`, `final` or, for another checkpoint that `evaluate` registers,
            `promoted`.
        step: step of the checkpoint; its weights contain the updates of all earlier steps.
        state_path: tinker:// path of its weights and optimizer state.
        lineage: tags such as the run's name, base model and parent.
        model_id: ID of its logged model; if empty, `promote` creates the logged model.
    """

    alias: str
    step: int
    state_path: str
    lineage: Mapping[str, str]
    model_id: str = ""


@retried_task(name="promote", task_run_name="promote-{promoted.alias}")
def promote(log: MetricsLog, name: str, promoted: Promotion, save_for_sampling: Callable[[], str]) -> str:
    """Register a checkpoint as a version of the model `name`, and point the alias to this version; return the version.

    A checkpoint that is registered already keeps its version.

    The source of the version is the tinker:// path for sampling. The logged model has the metrics that the run logged
    at the checkpoint's step.

    Args:
        save_for_sampling: function that returns the tinker:// path of the weights for sampling and saves them if
            needed.

    Raises:
        ServiceError: MLflow rejected the model, for example because its store has no registry.
        LostRunError: another process has taken over the run.
    """
    try:
        version = _find(log, name, promoted.state_path) or _register(log, name, promoted, save_for_sampling())
        log.check_writer()
        log.client.set_registered_model_alias(name, promoted.alias, version)
        log.tag(VERSION_TAG, f"{name} version {version}")
    except MlflowException as error:
        raise ServiceError(
            f"The checkpoint {promoted.state_path} could not be registered as the model {name!r} ({reason(error)}): "
            "choose another name for register_as, or a tracking server with a model registry."
        ) from error
    return version


def promote_from(
    checkpoint_key: str, log: MetricsLog, name: str, promoted: Promotion, save_for_sampling: Callable[[], str]
) -> str:
    """Call `promote`, and report the model version as a Prefect asset that derives from the checkpoint."""

    def describe(version: str) -> dict[str, object]:
        checkpoint = {"alias": promoted.alias, "step": promoted.step, "state_path": promoted.state_path}
        return {"version": version, "mlflow_run_id": log.run_id, **checkpoint}

    upstream = [Asset(key=checkpoint_key)] if checkpoint_key else []
    task = materialize(promote, asset_key(f"mlflow://models/{name}@{promoted.alias}"), upstream, describe)
    return call(task, log, name, promoted, save_for_sampling)


def _find(log: MetricsLog, name: str, state_path: str) -> str | None:
    versions: list[ModelVersion] = [*log.client.search_model_versions(f"run_id = '{log.run_id}'")]
    matching = (v.version for v in versions if v.name == name and v.tags.get(STATE_TAG) == state_path)
    return next(map(str, matching), None)


def _register(log: MetricsLog, name: str, promoted: Promotion, sampler_path: str) -> str:
    client = log.client
    tags = {"tinker.path": sampler_path, STATE_TAG: promoted.state_path, **promoted.lineage}
    model_id = promoted.model_id or log_model(log, name, promoted.step, tags)
    log.check_writer()
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != ErrorCode.Name(RESOURCE_ALREADY_EXISTS):
            raise
    # MLflow's SQL registries drop the argument `model_id`, so the ID is also a tag.
    tags |= {STEP_TAG: str(promoted.step), "tinker_flows.model_id": model_id}
    version = client.create_model_version(name, sampler_path, run_id=log.run_id, tags=tags, model_id=model_id)
    return str(version.version)
