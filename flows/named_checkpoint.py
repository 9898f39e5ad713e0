"""Weights that a config names: a checkpoint of a run, a `tinker://` path, or the base model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeVar

from pydantic import Field
from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks import RunStorage
from blocks.errors import ConfigError
from blocks.storage import CONFIG
from flows.config import NAME, PlaceConfig
from flows.fork import find_at, lack_of
from tasks.checkpoint import read_records, step_of

BASE = "base"
SERVICE_PATH = "tinker://"
CHECKPOINT = rf"^({BASE}|tinker://\S+|{NAME}(@(\d+|best|final))?)$"
WHAT = (
    "`RUN`, `RUN@STEP`, `RUN@best` or `RUN@final` of the storage, a `tinker://` path, or `base`, the model without an "
    "adapter."
)


class WeightsConfig(PlaceConfig):
    """Where weights are, and of which model."""

    model: str = Field(
        default="",
        title="Model",
        description="Base model by the service's name; empty: that of the run that is named.",
    )


C = TypeVar("C", bound=WeightsConfig)


@dataclass(frozen=True, slots=True)
class NamedCheckpoint:
    """Weights on the service.

    Attributes:
        name: what the config calls them.
        path: tinker:// path; empty for the base model.
        step: the updates that they hold, as far as a run's record tells; else 0.
        run_name, model: of the run; empty where none is named.
    """

    name: str
    path: str
    step: int = 0
    run_name: str = ""
    model: str = ""


def find_checkpoint(name: str, storage: RunStorage) -> NamedCheckpoint:
    """Look weights up by their name.

    Raises:
        ConfigError: there is no such run, or it has no such checkpoint.
    """
    if name == BASE:
        return NamedCheckpoint(name, "")
    if name.startswith(SERVICE_PATH):
        return NamedCheckpoint(name, name)
    run_name, _, at = name.partition("@")
    directory = storage.run_directory(run_name)
    records = read_records(directory)
    found = find_at(records, at)
    if not found:
        steps = ", ".join(str(step) for step in sorted({step_of(each) for each in records.checkpoints}))
        lack = (
            f"{lack_of(at)}; it has checkpoints at {steps}" if steps else f"has no checkpoint in {directory.location}"
        )
        raise ConfigError(f"There is no {name!r}: the run {run_name!r} {lack}. Name another, or a tinker:// path.")
    return _of_record(name, run_name, found[0], directory.read_bytes(CONFIG))


def with_model(config: C, *checkpoints: NamedCheckpoint) -> C:
    """The config with the model that the checkpoints are of.

    Raises:
        ConfigError: nobody says which it is.
    """
    found = [config.model, *(each.model for each in checkpoints)]
    model = next((each for each in found if each), "")
    if not model:
        raise ConfigError("Nobody says which model the weights are of: set model to the base model's name.")
    return config.model_copy(update={"model": model})


def _of_record(name: str, run_name: str, record: CheckpointRecord, config: bytes | None) -> NamedCheckpoint:
    model = str(json.loads(config).get("model", "")) if config else ""
    return NamedCheckpoint(name, record.state_path or "", step_of(record), run_name, model)
