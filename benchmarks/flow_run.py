"""A flow's run as a process of its own, and what it has logged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from mlflow import MlflowClient
from mlflow.entities import Metric

from benchmarks.scratch import run_module

_NAME = "bench"


@dataclass(frozen=True, slots=True)
class FlowRun:
    """A run that is done.

    Attributes:
        folder: of its record, its MLflow store and its log.
        whole_s: what its process took.
    """

    folder: Path
    whole_s: float

    def points(self, key: str) -> list[Metric]:
        """A metric at each step, in their order."""
        record = json.loads((self.folder / _NAME / "checkpoints.jsonl").read_text().splitlines()[-1])
        history = MlflowClient(_tracking(self.folder)).get_metric_history(record["mlflow_run_id"], key)
        return sorted(history, key=lambda point: point.step)


def run_flow(command: Sequence[str], folder: Path, config: Mapping[str, Any]) -> FlowRun:
    """Run a config to its end, with all that it keeps in a new folder.

    Args:
        command: a module and its arguments, to which the config's file is added.
    """
    folder.mkdir()
    path = folder / "config.yaml"
    whole = {"run_name": _NAME, "storage": str(folder), "tracking": _tracking(folder), "eval_every": 0, **config}
    path.write_text(yaml.safe_dump(whole))
    return FlowRun(folder, run_module([*command, "--config", str(path)], folder / "log"))


def _tracking(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"
