"""Runs started by tinker-cookbook's supervised loop and continued by sft, and vice versa, with equal weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cookbook_sft import train_with_cookbook, write_builder_params
from engine_process import API_KEY, EngineProcess
from saved_weights import saved_weights
from sft_config import sft_fields

from flows.config.train import SftConfig
from flows.sft import sft

pytestmark = pytest.mark.usefixtures("prefect_server")
NUM_EPOCHS, STEPS_PER_EPOCH, SAVE_EVERY = 4, 3, 5
NUM_STEPS = NUM_EPOCHS * STEPS_PER_EPOCH


@pytest.fixture(autouse=True)
def service(engine_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    monkeypatch.setenv("TINKER_BASE_URL", engine_url)


@pytest.fixture
def builder_params(tmp_path: Path) -> dict[str, Any]:
    """Write few rows, so that an epoch ends between two checkpoints, where the batch counts of both formats differ."""
    return write_builder_params(tmp_path, STEPS_PER_EPOCH)


@pytest.fixture
def fields(tmp_path: Path, mlflow_uri: str, engine_url: str, builder_params: dict[str, Any]) -> dict[str, Any]:
    data = {"builder": "examples.gsm8k:Gsm8kBuilder", "params": builder_params}
    changes = {"num_steps": None, "num_epochs": NUM_EPOCHS, "checkpoint_every": SAVE_EVERY, "eval_every": 0}
    return sft_fields(tmp_path, "run", mlflow_uri, engine_url) | changes | {"data": data, "objective": {}}


def cookbook(directory: Path, builder_params: dict[str, Any]) -> None:
    train_with_cookbook(directory, builder_params, num_epochs=NUM_EPOCHS, save_every=SAVE_EVERY)


def keep_first_checkpoint(directory: Path) -> dict[str, Any]:
    """Truncate the records as if the run had been killed after this one; return the last record."""
    path = directory / "checkpoints.jsonl"
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    path.write_text(lines[0] + "\n")
    return json.loads(lines[-1])


def last_checkpoint(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "checkpoints.jsonl").read_text().splitlines()[-1])


@pytest.mark.slow
def test_cookbook_run_continues_in_sft(
    tmp_path: Path, fields: dict[str, Any], builder_params: dict[str, Any], engine: EngineProcess
) -> None:
    """Batches that the cookbook had submitted before its save are not trained on twice."""
    directory = tmp_path / "runs" / "run"
    cookbook(directory, builder_params)
    whole = keep_first_checkpoint(directory)
    result = sft(SftConfig.model_validate(fields))
    assert SAVE_EVERY < result.resumed_from < NUM_STEPS
    assert saved_weights(engine.state, result.state_path) == saved_weights(engine.state, whole["state_path"])
    assert json.loads((directory / "config.json").read_text())["run_name"] == "run"
    assert sft(SftConfig.model_validate(fields)).resumed_from == NUM_STEPS


def test_sft_run_continues_in_the_cookbook_and_back(
    tmp_path: Path, fields: dict[str, Any], builder_params: dict[str, Any], engine: EngineProcess
) -> None:
    directory = tmp_path / "runs" / "run"
    whole = sft(SftConfig.model_validate(fields))
    keep_first_checkpoint(directory)
    cookbook(directory, builder_params)
    ended = last_checkpoint(directory)
    assert ended["state_path"] != whole.state_path
    assert saved_weights(engine.state, ended["state_path"]) == saved_weights(engine.state, whole.state_path)
    back = sft(SftConfig.model_validate(fields))
    assert (back.resumed_from, back.state_path) == (NUM_STEPS, ended["state_path"])
    assert back.mlflow_run_id == whole.mlflow_run_id
