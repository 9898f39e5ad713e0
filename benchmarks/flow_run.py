"""Run of a flow in a separate process, and its logged metrics."""

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
    """Finished run.

    Attributes:
        folder: folder of the run directory, the MLflow store and the log.
        whole_s: duration of the process in seconds.
    """

    folder: Path
    whole_s: float

    def points(self, key: str) -> list[Metric]:
        """Return the points of a metric in the order of the steps."""
        record = json.loads((self.folder / _NAME / "checkpoints.jsonl").read_text().splitlines()[-1])
        history = MlflowClient(_tracking(self.folder)).get_metric_history(record["mlflow_run_id"], key)
        return sorted(history, key=lambda point: point.step)


def run_flow(command: Sequence[str], folder: Path, config: Mapping[str, Any]) -> FlowRun:
    """Run a config to completion with all outputs in a new folder.

    Args:
        command: module and arguments, to which `--config FILE` is appended.
    """
    folder.mkdir()
    path = folder / "config.yaml"
    fields = {"run_name": _NAME, "storage": str(folder), "tracking": _tracking(folder), "eval_every": 0, **config}
    path.write_text(yaml.safe_dump(fields))
    return FlowRun(folder, run_module([*command, "--config", str(path)], folder / "log"))


def _tracking(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"
