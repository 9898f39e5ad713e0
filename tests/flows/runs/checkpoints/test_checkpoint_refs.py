"""Names of checkpoints that a run does not have, and runs with a damaged config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blocks import RunStorage
from blocks.errors import ConfigError
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
