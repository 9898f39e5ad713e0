"""Ctrl-C during an evaluation ends the run before the next update."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tinker
from engine_process import API_KEY, EngineProcess
from mlflow import MlflowClient
from rl_config import rl_fields
from saved_weights import saved_weights
from sft_config import sft_fields
from tinker_cookbook.eval.evaluators import TrainingClientEvaluator

from flows.config.rl import RlConfig
from flows.config.train import SftConfig
from flows.rl import rl
from flows.sft import sft

NUM_STEPS = 4


class Interrupting(TrainingClientEvaluator):
    """Metric of an evaluation during which Ctrl-C is pressed, if `marker` does not exist yet."""

    def __init__(self, marker: str, evaluation: int) -> None:
        self.marker, self.remaining = Path(marker), evaluation

    async def __call__(self, training_client: tinker.TrainingClient) -> dict[str, float]:
        if self.remaining == 0 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGINT)
        self.remaining -= 1
        return {"constant": 1.0}


@pytest.fixture
def fields(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    engine: EngineProcess,
    mlflow_uri: str,
    prefect_server: str,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    fields = sft_fields(tmp_path, request.function.__name__, mlflow_uri, engine.url)
    return fields | {"num_steps": NUM_STEPS, "eval_every": 2, "checkpoint_every": 0, "report": {"num_examples": 2}}


def interrupting(tmp_path: Path, evaluation: int) -> dict[str, Any]:
    params = {"marker": str(tmp_path / "interrupted"), "evaluation": evaluation}
    return {"evaluators": [{"builder": f"{__name__}:Interrupting", "params": params}]}


def checkpoints(tmp_path: Path, run_name: str) -> list[dict[str, Any]]:
    file = tmp_path / "runs" / run_name / "checkpoints.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def evaluated_steps(mlflow_uri: str, run_name: str) -> list[int]:
    client = MlflowClient(mlflow_uri)
    experiment = client.get_experiment_by_name("tinker-flows")
    assert experiment
    (run,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{run_name}'")
    return [point.step for point in client.get_metric_history(run.info.run_id, "constant")]


def cost(mlflow_uri: str, run_name: str) -> float:
    client = MlflowClient(mlflow_uri)
    experiment = client.get_experiment_by_name("tinker-flows")
    assert experiment
    (run,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{run_name}'")
    return run.data.metrics["cost/num_train_tokens"]


def test_first_evaluation(
    tmp_path: Path, fields: dict[str, Any], mlflow_uri: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """No step is trained and no example is sampled; the same command then runs from the start."""
    config = SftConfig.model_validate(fields | interrupting(tmp_path, 0))
    with pytest.raises(KeyboardInterrupt):
        sft(config)
    output = capfd.readouterr().err
    assert "sampling" not in output
    assert "Saved the weights" not in output
    assert checkpoints(tmp_path, config.run_name) == []
    assert not (tmp_path / "runs" / config.run_name / "examples.jsonl").exists()
    paid = cost(mlflow_uri, config.run_name)
    assert paid > 0
    result = sft(config)
    assert result.num_steps == NUM_STEPS
    assert result.metrics["cost/num_train_tokens"] > paid


@pytest.mark.slow
def test_later_evaluation(
    tmp_path: Path, fields: dict[str, Any], mlflow_uri: str, engine: EngineProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is that of the evaluated weights, and the resumed run equals an uninterrupted one."""
    config = SftConfig.model_validate(fields | interrupting(tmp_path, 1))
    with pytest.raises(KeyboardInterrupt):
        sft(config)
    saved = f"Saved the weights and the optimizer state of {config.run_name} after 2 of 4 steps."
    assert saved in capfd.readouterr().err
    assert [record["step"] for record in checkpoints(tmp_path, config.run_name)] == [2]
    logged = cost(mlflow_uri, config.run_name)
    sft(config)
    sft(SftConfig.model_validate({**config.model_dump(), "run_name": "uninterrupted"}))
    resumed, whole = (checkpoints(tmp_path, name)[-1]["state_path"] for name in (config.run_name, "uninterrupted"))
    assert saved_weights(engine.state, resumed) == saved_weights(engine.state, whole)
    assert evaluated_steps(mlflow_uri, config.run_name) == [0, 2, 4]
    # The interrupted evaluation was paid for: its tokens are those of the held-out data.
    whole_cost, resumed_cost = (cost(mlflow_uri, name) for name in ("uninterrupted", config.run_name))
    assert logged < whole_cost < resumed_cost


def test_evaluation_of_rl(
    tmp_path: Path, fields: dict[str, Any], mlflow_uri: str, engine: EngineProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rollouts of the step are trained on. The evaluation is not repeated, so its examples are stored."""
    own = rl_fields(tmp_path, fields["run_name"], mlflow_uri, engine.url) | interrupting(tmp_path, 0)
    with pytest.raises(KeyboardInterrupt):
        rl(RlConfig.model_validate(own))
    assert (
        f"Saved the weights and the optimizer state of {own['run_name']} after 1 of 4 steps." in capfd.readouterr().err
    )
    assert [record["step"] for record in checkpoints(tmp_path, own["run_name"])] == [1]
    (line,) = (tmp_path / "runs" / own["run_name"] / "examples.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 0
    assert evaluated_steps(mlflow_uri, own["run_name"]) == [0]
