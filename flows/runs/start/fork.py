"""New runs that start from given weights: forks, named by `resume`, and fresh runs from `init_from`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks import RunStorage
from blocks.errors import ConfigError
from flows.config.base import BASE, SERVICE_PATH, RunConfig
from flows.config.train import TrainConfig
from flows.runs.checkpoints.checkpoint_refs import (
    NamedCheckpoint,
    describe_missing,
    find_checkpoints,
    select_checkpoints,
)
from flows.runs.start.config_record import trains_otherwise
from tasks.training.checkpoints import read_records, step_of

# Key of a record whose weights are loaded without the moments of the optimizer.
FRESH_OPTIMIZER = "fresh_optimizer"

# State that a fork inherits from its parent's record; spent budget and MLflow run stay with the parent.
_INHERITED = ("objective", "guard", "source", FRESH_OPTIMIZER)

# Parts of the objective's state that depend on the parent's terms and data. A fork with others chooses them anew.
_CHOICES = ("estimators", "has_chosen", "on_candidates", "passes", "last")

# Fields that change neither the objective nor the data; `MAY_CHANGE` has further ones.
_OF_TRAINING = {
    *("run_name", "init_from", "num_steps", "num_epochs", "learning_rate", "lr_schedule", "adam"),
    *("engine", "granularity", "prompt_logprobs_last_n", "transcripts_every"),
}


def is_fork(config: RunConfig) -> bool:
    """Return whether `resume` names a checkpoint to start from."""
    return config.resume not in ("auto", "never")


def named_origin(config: RunConfig) -> str:
    """Return the field and the name of the weights that a run starts from, for an error message."""
    return f"resume is {config.resume!r}" if is_fork(config) else f"init_from is {config.init_from!r}"


def starts_of(config: RunConfig, storage: RunStorage) -> list[CheckpointRecord]:
    """Return the checkpoints that a new run may start from, preferred one first; empty for the base model.

    Raises:
        ConfigError: The run or the checkpoint does not exist, or a fork cannot continue from it.
    """
    if is_fork(config):
        return _starts_of_fork(config, storage)
    if config.init_from == BASE:
        return []
    checkpoints = find_checkpoints(config.init_from, storage)
    for checkpoint in checkpoints:
        check_model(config, checkpoint.model or config.model)
    return [_initial_weights(config, checkpoint) for checkpoint in checkpoints]


def check_end(config: TrainConfig, step: int, num_steps: int) -> None:
    """Check that a run has a step left after its origin.

    Raises:
        ConfigError: A fork starts at or after its last step.
    """
    if step >= num_steps:
        limit = "num_steps" if num_steps == config.num_steps else "num_epochs"
        raise ConfigError(
            f"resume is {config.resume!r}, at step {step}, but this run ends at step {num_steps}: raise {limit}, or "
            "start at step 0 with its weights through init_from."
        )


def check_model(config: RunConfig, base_model: str) -> None:
    """Check that the weights that a run starts from have its base model.

    Raises:
        ConfigError: They have another one.
    """
    if base_model != config.model:
        raise ConfigError(
            f"{named_origin(config)}, an adapter of {base_model}, but model is {config.model}: set model to "
            f"{base_model}, or name weights of {config.model}."
        )


def check_lineage(config: RunConfig, records: Sequence[CheckpointRecord]) -> None:
    """Check that a resumed fork names the same checkpoint as at its start.

    Args:
        records: Records of the run, newest first.

    Raises:
        ConfigError: `resume` names another checkpoint.
    """
    if not (records and is_fork(config)):
        return
    parent = records[-1].get("parent", {})
    if parent.get("resume") != config.resume:
        origin = f"started from {parent['resume']}" if "resume" in parent else "is no fork"
        raise ConfigError(
            f"The run {config.run_name!r} {origin} and is at step {step_of(records[0])}, but resume is "
            f"{config.resume!r}: choose another run_name for another fork, or set resume to auto to resume that run."
        )


def _initial_weights(config: RunConfig, checkpoint: NamedCheckpoint) -> CheckpointRecord:
    parent = {"init_from": config.init_from, "state_path": checkpoint.path}
    if checkpoint.run_name:
        parent |= {"run_name": checkpoint.run_name, "step": checkpoint.step}
    return _start(checkpoint.path, 0, {FRESH_OPTIMIZER: True}, parent)


def _starts_of_fork(config: RunConfig, storage: RunStorage) -> list[CheckpointRecord]:
    """Return the checkpoints that `resume` names, preferred one first.

    Raises:
        ConfigError: The run or the checkpoint does not exist, or a run cannot continue from it.
    """
    if config.resume.startswith(SERVICE_PATH):
        if "/sampler_weights/" in config.resume:
            raise ConfigError(
                f"resume is {config.resume!r}, whose weights can only be sampled from: use the path of a checkpoint "
                "with optimizer state, tinker://RUN/weights/NAME, or start with a fresh optimizer through init_from."
            )
        parent = {"resume": config.resume, "state_path": config.resume}
        return [_start(config.resume, 0, {}, parent)]
    name, _, at = config.resume.partition("@")
    directory = storage.run_directory(name)
    records = read_records(directory)
    if name == config.run_name or not records.checkpoints:
        problem = "is this run itself" if name == config.run_name else f"has no checkpoint in {directory.location}"
        raise ConfigError(
            f"resume is {config.resume!r}, but {name!r} {problem}: use another run in the same storage, or the "
            "tinker:// path of a checkpoint."
        )
    matches = select_checkpoints(records, at)
    if not matches:
        steps = ", ".join(str(step) for step in sorted({step_of(record) for record in records.checkpoints}))
        raise ConfigError(
            f"resume is {config.resume!r}, but the run {name!r} {describe_missing(at)}; it has checkpoints at {steps}: "
            "use one of them."
        )
    if not all(record.has("step") for record in matches):
        raise ConfigError(
            f"resume is {config.resume!r}, but {name!r} is a run of tinker-cookbook, whose steps count within an "
            f"epoch: use the tinker:// path of a checkpoint, such as {matches[0].state_path}."
        )
    is_other = trains_otherwise(directory, config, _OF_TRAINING)
    return [_start_at(config, name, record, is_other=is_other) for record in matches]


def _start_at(config: RunConfig, name: str, record: CheckpointRecord, *, is_other: bool) -> CheckpointRecord:
    """Return the start of a fork.

    Args:
        is_other: whether the fork has another objective, other data or another method than its parent.
    """
    step, path = step_of(record), record.state_path or ""
    parent = {
        "resume": config.resume,
        "run_name": name,
        "step": step,
        "state_path": path,
        "mlflow_run_id": record.get("mlflow_run_id", ""),
    }
    inherited = {key: record.extra[key] for key in _INHERITED if record.has(key)}
    if is_other:
        inherited.pop("guard", None)  # losses of another objective or of other data are no measure of a spike
        chosen = inherited.get("objective", {})
        targets = {name: {**target, "gain_unit": None} for name, target in chosen.get("targets", {}).items()}
        learned = {key: chosen[key] for key in chosen if key not in _CHOICES}
        inherited["objective"] = learned | {"passes": None, "targets": targets}
    return _start(path, step, inherited, parent)


def _start(path: str, step: int, inherited: dict[str, Any], parent: dict[str, Any]) -> CheckpointRecord:
    extra = {"step": step, **inherited, "parent": parent}
    return CheckpointRecord(name="fork", batch=step, epoch=0, state_path=path, extra=extra)
