"""Names of checkpoints that a run does not have."""

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
