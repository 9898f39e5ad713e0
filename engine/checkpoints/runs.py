"""Metadata of training runs on disk, so that clients can query a run after a restart of the engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from engine.checkpoints.files import disk_errors, replace_json
from engine.checkpoints.names import run_folder
from engine.compute.lora import LoraSpec
from engine.errors import EngineError, NotFoundError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Metadata of one training run."""

    model_id: Annotated[str, Field(alias="run")]  # `run` is its key in run.json
    base_model: str
    lora: LoraSpec
    created_at: datetime
    user_metadata: Mapping[str, str] = field(default_factory=dict)


_RUN = TypeAdapter(TrainingRun)


class RunStore:
    """All training runs under one state folder."""

    def __init__(self, state: Path) -> None:
        self._runs = state / "runs"

    def save(self, run: TrainingRun) -> None:
        """Write the metadata of a training run.

        Raises:
            EngineError: the write to disk failed.
        """
        folder = self._runs / run_folder(run.model_id)
        with disk_errors(f"The training run {run.model_id}"):
            folder.mkdir(parents=True, exist_ok=True)
            replace_json(folder / "run.json", _RUN.dump_python(run, mode="json", by_alias=True))

    def find(self, run: str) -> TrainingRun:
        """Return the metadata of a training run.

        Raises:
            NotFoundError: the run does not exist.
            EngineError: its description is damaged.
        """
        path = self._runs / run_folder(run) / "run.json"
        if not path.is_file():
            raise NotFoundError(f"There is no training run {run!r} in this engine's state folder: check the run id.")
        return _read(path)

    def all(self) -> list[TrainingRun]:
        """List all runs, newest first; skip a run with a damaged description, with a warning in the log."""
        runs = []
        for path in self._runs.glob("*/run.json"):
            try:
                runs.append(_read(path))
            except EngineError as error:
                log.warning("%s", error)
        return sorted(runs, key=lambda run: run.created_at, reverse=True)


def _read(path: Path) -> TrainingRun:
    try:
        return _RUN.validate_json(path.read_bytes())
    except ValidationError as error:
        raise EngineError(
            f"The description {path} of a training run is damaged; its checkpoints can still be loaded."
        ) from error
