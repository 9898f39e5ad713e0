"""Servers that the command line starts for a run, or finds running."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from forked_program import start_program
from sft_config import sft_fields

from blocks.errors import RolledBackError
from flows.config.train import SftConfig
from flows.runs.blocks import engine_ahead, open_service

pytestmark = pytest.mark.process

SETTINGS = ("PREFECT_API_URL", "TINKER_BASE_URL", "TINKER_API_KEY", "MLFLOW_TRACKING_URI")


def command(folder: Path, base_url: str = "local", **changes: object) -> list[str]:
    """Return the command of a run of two steps."""
    fields = sft_fields(folder, "mine", "", base_url) | {"num_steps": 2, "eval_every": 0, "objective": {}} | changes
    (folder / "sft.yaml").write_text(yaml.safe_dump(fields))
    return ["-m", "flows.sft", "--config", str(folder / "sft.yaml")]


def environment(folder: Path) -> dict[str, str]:
    """Return an environment with the project home `folder/home` and without settings of servers."""
    variables = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    return variables | {"TINKER_FLOWS_HOME": str(folder / "home"), "TINKER_API_KEY": "tml-test"}


def run_sft(folder: Path, base_url: str = "local", **changes: object) -> subprocess.CompletedProcess[str]:
    """Run two steps on the command line."""
    program = [sys.executable, *command(folder, base_url, **changes)]
    return subprocess.run(program, env=environment(folder), capture_output=True, text=True, check=False)


def test_a_run_starts_one_server_of_each_kind_and_stops_them(tmp_path: Path) -> None:
    run = run_sft(tmp_path)
    assert run.returncode == 0, run.stderr
    assert "mine: 2 steps" in run.stdout
    assert "has not recorded" not in run.stderr
    logs = sorted(log.name.partition("-")[0] for log in (tmp_path / "home" / "logs").iterdir())
    assert logs == ["engine", "prefect"]
    home = str(tmp_path / "home")
    assert not [process for process in psutil.process_iter(["cmdline"]) if home in str(process.info["cmdline"])]


def test_a_run_uses_the_prefect_server_of_up(tmp_path: Path, prefect_server: str, engine_url: str) -> None:
    (tmp_path / "home").mkdir()
    with (tmp_path / "home" / "up.json").open("w") as stack:
        exports = {"PREFECT_API_URL": prefect_server, "PREFECT_API_AUTH_STRING": "u:p"}
        json.dump({"exports": exports | {"MLFLOW_TRACKING_URI": "http://127.0.0.1:5000"}}, stack)
        stack.flush()
        fcntl.flock(stack, fcntl.LOCK_EX)  # as `up` does while it runs
        run = start_program(command(tmp_path, engine_url), environment(tmp_path), tmp_path / "run.log")
        assert run.wait(240) == 0, run.output()
    assert f"Using the Prefect server of `tinker-flows up` at {prefect_server}" in run.output()
    assert f"Prefect UI   {prefect_server.removesuffix('/api')}/runs/flow-run/" in run.output()
    assert not (tmp_path / "home" / "logs").exists()


def test_an_engine_started_ahead_serves_one_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that lost its engine starts another; an attempt that fails leaves no engine to the next one."""
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    config = SftConfig.model_validate(sft_fields(tmp_path, "mine", ""))
    urls: list[str] = []

    def fail() -> None:
        with open_service(config) as first:
            assert "tiny" in first.models()
            urls.append(first.base_url)
            assert len(engines_in(tmp_path)) == 1
            raise RolledBackError("Step 3 is skipped.")

    with engine_ahead(config):
        with pytest.raises(RolledBackError):
            fail()
        assert not engines_in(tmp_path)
        with open_service(config) as second:
            assert "tiny" in second.models()
        assert urls != [second.base_url]
    assert not engines_in(tmp_path)


def engines_in(folder: Path) -> list[psutil.Process]:
    """Child processes whose project home is in a folder."""
    return [child for child in psutil.Process().children() if f"{folder}/home" in str(child.cmdline())]


def test_an_invalid_config_ends_the_command_before_its_servers_are_up(tmp_path: Path) -> None:
    run = run_sft(tmp_path, "http://me:s3cr3t@127.0.0.1:1")
    assert run.returncode == 1
    (message,) = run.stderr.splitlines()
    assert message.startswith("error: The config is invalid")
    assert "s3cr3t" not in message


def test_a_builder_that_does_not_exist_ends_the_command_before_the_engine_starts(tmp_path: Path) -> None:
    run = run_sft(tmp_path, data={"builder": "examples.gsm8k:Gsm9k"})
    assert run.returncode == 1
    (message,) = run.stderr.splitlines()
    assert message.startswith("error: data.builder is 'examples.gsm8k:Gsm9k', which cannot be imported")
    assert not list((tmp_path / "home" / "logs").glob("engine-*"))
