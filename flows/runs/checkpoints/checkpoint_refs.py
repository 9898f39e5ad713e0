"""Resolve the names of weights: a checkpoint of a run, a `tinker://` path, or the base model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks import RunStorage
from blocks.errors import ConfigError
from blocks.storage import CONFIG
from flows.config.base import BASE, SERVICE_PATH, WeightsConfig
from flows.runs.start.config_record import RecordedConfig
from tasks.common.assets import asset_key
from tasks.training.checkpoints import Records, read_records, step_of

C = TypeVar("C", bound=WeightsConfig)


@dataclass(frozen=True, slots=True)
class NamedCheckpoint:
    """Weights on the service.

    Attributes:
        name: Name in the config.
        path: tinker:// path; empty for the base model.
        step: Number of steps whose updates the weights contain, by the run's record; 0 without a record.
        run_name, model: Run and base model; empty without a record.
        key: Key as a Prefect asset; empty for the base model.
    """

    name: str
    path: str
    step: int = 0
    run_name: str = ""
    model: str = ""
    key: str = ""


def find_checkpoint(name: str, storage: RunStorage) -> NamedCheckpoint:
    """Look weights up by their name; the newest weights of a run if the name has no `@`.

    Raises:
        ConfigError: The run or the checkpoint does not exist, or the run's config.json is damaged.
    """
    return find_checkpoints(name, storage)[0]


def find_checkpoints(name: str, storage: RunStorage) -> list[NamedCheckpoint]:
    """Return all weights that a name can mean: the newest first, and at the same step those with optimizer state.

    Raises:
        ConfigError: The run or the checkpoint does not exist, or the run's config.json is damaged.
    """
    if name == BASE:
        return [NamedCheckpoint(name, "")]
    if name.startswith(SERVICE_PATH):
        return [NamedCheckpoint(name, name, key=asset_key(name))]
    run_name, _, at = name.partition("@")
    directory = storage.run_directory(run_name)
    records = read_records(directory)
    matches = select_checkpoints(records, at)
    if not at:
        # The sort is stable: of weights of the same step, those with a state come first.
        matches = sorted([*matches, *records.samplers], key=step_of, reverse=True)
    elif not matches:
        matches = [record for record in records.samplers if at == str(step_of(record))]
    if not matches:
        saved = (*records.checkpoints, *records.samplers)
        steps = ", ".join(str(step) for step in sorted({step_of(record) for record in saved}))
        problem = (
            f"{describe_missing(at)}; it has checkpoints at {steps}"
            if steps
            else f"has no checkpoint in {directory.location}"
        )
        raise ConfigError(
            f"The checkpoint {name!r} does not exist: the run {run_name!r} {problem}. Use another checkpoint or a "
            "tinker:// path."
        )
    config = directory.read_bytes(CONFIG)
    return [_of_record(name, run_name, record, config, directory.location) for record in matches]


def find_steps(checkpoint: NamedCheckpoint, steps: str, storage: RunStorage) -> list[NamedCheckpoint]:
    """Return the other checkpoints of the same run, at the given steps, by increasing step.

    Args:
        steps: step numbers separated by commas; `all` for all but the origin of a fork or of initial weights,
            which its own run may have deleted; empty for none.

    Raises:
        ConfigError: `checkpoint` does not belong to a run, or the run has no checkpoint at one of the steps.
    """
    if not steps:
        return []
    if not checkpoint.run_name:
        raise ConfigError(f"steps needs the checkpoint of a run, but checkpoint is {checkpoint.name}: name a run.")
    if steps == "all":
        records = read_records(storage.run_directory(checkpoint.run_name))
        own = [record for record in (*records.checkpoints, *records.samplers) if not record.has("parent")]
        selected = {step_of(record) for record in own}
    else:
        selected = {int(step) for step in steps.split(",")}
    others = sorted(selected - {checkpoint.step})
    return [find_checkpoint(f"{checkpoint.run_name}@{step}", storage) for step in others]


def select_checkpoints(records: Records, at: str) -> list[CheckpointRecord]:
    """Return the checkpoints with state at `STEP`, `best` or `final`, preferred one first; all for an empty string."""
    if at == "best":
        return [record for record in records.checkpoints if record.state_path == records.best.get("best")]
    if at == "final":
        return [record for record in records.checkpoints if record.final][:1]
    return [record for record in records.checkpoints if not at or (at.isdecimal() and step_of(record) == int(at))]


def describe_missing(at: str) -> str:
    """Describe a checkpoint that a run does not have, for an error message."""
    if at == "best":
        return "has no best checkpoint, which needs keep_best"
    if at == "final":
        return "has no final checkpoint yet"
    if at.isdecimal():
        return f"has no checkpoint at step {at}"
    return f"has no checkpoint {at!r}, which is neither a step nor best nor final"


def with_model(config: C, *checkpoints: NamedCheckpoint) -> C:
    """Fill in the model of a config from its checkpoints.

    Raises:
        ConfigError: Neither the config nor a checkpoint names the model.
    """
    models = [config.model, *(checkpoint.model for checkpoint in checkpoints)]
    model = next((name for name in models if name), "")
    if not model:
        raise ConfigError(
            "The model of the weights is unknown: set model to the base model's name (--model for sample and chat)."
        )
    return config.model_copy(update={"model": model})


def checkpoint_key(location: str, name: str) -> str:
    """Return the key of a run's checkpoint as a Prefect asset.

    Args:
        location: location of the run's directory.
        name: name of the checkpoint's record.
    """
    return asset_key(f"{location}/checkpoints/{name}")


def _of_record(
    name: str, run_name: str, record: CheckpointRecord, config: bytes | None, location: str
) -> NamedCheckpoint:
    model = str(RecordedConfig.parse(config, location).fields.get("model", "")) if config else ""
    path = record.state_path or record.sampler_path or ""
    return NamedCheckpoint(name, path, step_of(record), run_name, model, checkpoint_key(location, record.name))
