"""`tinker-flows status`, `resume` and `report` on real runs: running, finished, failed and killed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from closed_folder import close_folder
from forked_program import start_program
from sft_config import sft_fields

from deployments.command_line import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("status")


@pytest.fixture(scope="module")
def environment(folder: Path, prefect_server: str, engine_url: str) -> Iterator[dict[str, str]]:
    """Exports of a terminal, also active in this process."""
    exports = {
        "PREFECT_API_URL": prefect_server,
        "TINKER_BASE_URL": engine_url,
        "TINKER_API_KEY": "tml-test",
        "TINKER_FLOWS_HOME": str(folder / "home"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in exports.items():
            patch.setenv(name, value)
        yield {**os.environ, **exports}


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    fields = sft_fields(folder, "unnamed", "", "") | {"num_epochs": 40, "eval_every": 0, "checkpoint_every": 1}
    path = folder / "sft.yaml"
    path.write_text(yaml.safe_dump(fields | {"storage": "", "objective": {}}))
    return path


def status(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        main(["status", "--json", *arguments])
    assert exit_info.value.code == 0
    return json.loads(capsys.readouterr().out)


def tinker_flows(*arguments: str) -> object:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    return exit_info.value.code


def test_status_creates_no_project_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    assert tinker_flows("status") == 0
    assert f"No runs in {tmp_path / 'home' / 'runs'}." in capsys.readouterr().out
    assert not (tmp_path / "home").exists()


@pytest.mark.timeout(900)
def test_status_of_a_running_killed_and_resumed_run(
    capsys: pytest.CaptureFixture[str], environment: dict[str, str], folder: Path, config: Path
) -> None:
    assert status(capsys) == []
    command = ["-m", "deployments.command_line", "run", "sft", "--config", str(config)]
    process = start_program([*command, "run_name=killed", "num_steps=30"], environment, folder / "killed.log")
    try:
        deadline = time.monotonic() + 250
        while not (folder / "home" / "runs" / "killed" / "checkpoints.jsonl").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        running = status(capsys, "killed")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(60)
    assert running["state"] == "running"
    assert running["writer"].startswith(f"process {process.pid} on ")
    assert f"flow run {running['flow_run_id']}" in running["writer"]
    assert running["num_steps"] == 30

    killed = status(capsys, "killed")
    assert killed["state"] == "killed"
    assert killed["writer"] == ""
    assert 1 <= killed["checkpoint_step"] <= killed["num_steps"] == 30
    assert killed["checkpoint"].startswith("tinker://")
    assert killed["mlflow_run_id"]

    assert tinker_flows("resume", "killed", "checkpoint_every=100") == 0
    assert "killed: 30 steps" in capsys.readouterr().out
    finished = status(capsys, "killed")
    assert (finished["state"], finished["step"], finished["num_steps"]) == ("finished", 30, 30)
    assert finished["mlflow_run_id"] == killed["mlflow_run_id"]
    assert finished["metric"] == "train_mean_nll"
    assert finished["value"] > 0

    report = folder / "home" / "runs" / "killed" / "report.html"
    num_drawings = report.read_text().count('class="plot"')
    report.unlink()
    capsys.readouterr()
    assert tinker_flows("report", "killed") == 0
    assert capsys.readouterr().out == f"{report}\n"
    assert report.read_text().count('class="plot"') == num_drawings > 0


def test_status_of_a_failed_run(capsys: pytest.CaptureFixture[str], environment: dict[str, str], config: Path) -> None:
    code = tinker_flows("run", "sft", "--config", str(config), "run_name=failed", "data.params.nonsense=1")
    assert str(code).startswith("error: ")
    failed = status(capsys, "failed")
    assert (failed["state"], failed["step"], failed["checkpoint_step"]) == ("failed", 0, None)
    assert failed["why"], "the reason is in MLflow, or else the sentence says where it is"
    assert {run["run_name"]: run["state"] for run in status(capsys)}["failed"] == "failed"
    assert tinker_flows("status") == 0
    shown = capsys.readouterr().out
    assert "failed" in shown
    assert tinker_flows("status", "failed") == 0
    assert str(tinker_flows("report", "failed")).startswith("error: Run 'failed' has not logged a step yet")


def test_a_run_that_cannot_be_read_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Path(environment["TINKER_FLOWS_HOME"]) / "runs"
    for name in ("closed", "open"):
        (runs / name).mkdir(parents=True)
        (runs / name / "config.json").write_text("damaged")
    close_folder(monkeypatch, "closed", "read_bytes")
    listed = {run["run_name"]: run for run in status(capsys)}
    assert (listed["closed"]["state"], listed["open"]["state"]) == ("unreadable", "damaged")
    assert "Permission denied" in listed["closed"]["why"]
