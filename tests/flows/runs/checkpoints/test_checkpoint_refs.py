"""Names of checkpoints that a run does not have, and runs with a damaged config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sft_config import sft_fields

from blocks import RunStorage
from blocks.errors import ConfigError
from flows.config.distill import TeacherConfig
from flows.config.train import SftConfig
from flows.estimates.costs import teacher_model
from flows.runs.checkpoints.checkpoint_refs import find_checkpoint


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mine@latest", "has no checkpoint 'latest', which is neither a step nor best nor final"),
        ("mine@3", "has no checkpoint at step 3"),
        ("mine@best", "has no best checkpoint, which needs keep_best"),
    ],
)
def test_the_error_names_the_problem_and_the_checkpoints(tmp_path: Path, name: str, problem: str) -> None:
    storage = RunStorage(url=str(tmp_path))
    record = {"name": "000002", "batch": 2, "epoch": 0, "step": 2, "state_path": "tinker://mine/weights/000002"}
    storage.run_directory("mine").append_line("checkpoints.jsonl", json.dumps(record))
    assert find_checkpoint("mine@2", storage).step == 2
    with pytest.raises(ConfigError, match=f"{problem}; it has checkpoints at 2"):
        find_checkpoint(name, storage)


@pytest.mark.parametrize("content", [b'{"run_na', b"[]", b'{"format_version": "four"}'])
def test_a_damaged_config_is_named(tmp_path: Path, content: bytes) -> None:
    directory = RunStorage(url=str(tmp_path)).run_directory("bad")
    directory.append_line("checkpoints.jsonl", json.dumps({"name": "2", "batch": 2, "state_path": "tinker://a"}))
    directory.write_bytes("config.json", content)
    with pytest.raises(ConfigError, match=r"bad/config\.json is not the config of a run: restore it"):
        find_checkpoint("bad", RunStorage(url=str(tmp_path)))


@pytest.mark.parametrize(
    ("teacher", "model"), [({"checkpoint": "big@2"}, "big-model"), ({"model": "other"}, "other"), ({}, "tiny")]
)
def test_a_teacher_has_the_model_of_its_checkpoint(tmp_path: Path, teacher: dict[str, str], model: str) -> None:
    """The price of a teacher is that of its own base model."""
    fields = sft_fields(tmp_path, "student", f"sqlite:///{tmp_path}/mlflow.db")
    config = SftConfig.model_validate(fields)
    directory = RunStorage(url=config.storage).run_directory("big")
    directory.append_line("checkpoints.jsonl", json.dumps({"name": "2", "batch": 2, "state_path": "tinker://a"}))
    directory.write_bytes("config.json", json.dumps({"run_name": "big", "model": "big-model"}).encode())
    assert teacher_model(config, TeacherConfig.model_validate(teacher)) == model
