"""The SDK's command line, run as a process against the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tinker
from engine_process import API_KEY


class CommandLine:
    """Runs `tinker --format json` against one engine."""

    def __init__(self, url: str) -> None:
        self._environment = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": API_KEY}

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", "from tinker.cli.__main__ import cli; cli()"]
        return subprocess.run(
            [*program, "--format", "json", *arguments],
            env=self._environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    def json(self, *arguments: str) -> dict[str, Any]:
        process = self(*arguments)
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)


@pytest.fixture
def command_line(engine_url: str) -> CommandLine:
    return CommandLine(engine_url)


@pytest.mark.slow
def test_run_and_checkpoint_commands(command_line: CommandLine, trainer: tinker.TrainingClient, tmp_path: Path) -> None:
    path = trainer.save_state("a").result().path
    assert path is not None
    assert trainer.model_id in [
        run["training_run_id"] for run in command_line.json("run", "list", "--limit", "0")["runs"]
    ]
    assert command_line.json("run", "info", trainer.model_id)["lora_rank"] == 4
    listed = command_line.json("checkpoint", "list", "--run-id", trainer.model_id)
    assert [checkpoint["tinker_path"] for checkpoint in listed["checkpoints"]] == [path]
    assert command_line("checkpoint", "publish", path).returncode == 0
    assert command_line("checkpoint", "set-ttl", path, "--ttl", "3600").returncode == 0
    info = command_line.json("checkpoint", "info", path)
    assert info["public"] is True
    assert info["expires_at"] is not None
    assert command_line("checkpoint", "unpublish", path).returncode == 0
    download = command_line("checkpoint", "download", path, "--output", str(tmp_path))
    assert download.returncode == 0, download.stderr
    assert {file.name for file in tmp_path.glob("*/*")} == {"adapter_config.json", "adapter_model.safetensors"}
    assert command_line.json("checkpoint", "delete", path, "--yes") == {"deleted_count": 1, "failed": []}
    missing = command_line("checkpoint", "info", path)
    assert missing.returncode != 0
    assert "not found" in missing.stderr


def test_run_info_and_version_commands(command_line: CommandLine, trainer: tinker.TrainingClient) -> None:
    assert command_line.json("run", "info", trainer.model_id)["base_model"] == "tiny"
    assert command_line("version").stdout.strip().endswith(tinker.__version__)
