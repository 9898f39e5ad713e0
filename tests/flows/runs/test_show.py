"""Addresses of the pages of a run and commands that its end shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks.servers.processes import RunningPrefectServer
from flows.runs import show
from flows.runs.result import TrainResult


@pytest.mark.parametrize("is_up", [False, True])
def test_pages_are_those_of_running_servers(is_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tinker-flows up` may serve the home of a run although no setting names its servers."""
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path))
    server = RunningPrefectServer("http://127.0.0.1:4300/api", "me:secret", "http://127.0.0.1:5300")
    monkeypatch.setattr(show, "running_prefect_server", lambda: server if is_up else None)
    fields = dict.fromkeys(TrainResult.__dataclass_fields__, cast(Any, ""))
    fields |= {"tracking_uri": f"sqlite:///{tmp_path / 'mlflow.db'}", "flow_run_id": "f", "mlflow_run_id": "m"}
    result = TrainResult(**fields | {"experiment_id": "1"})
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        pages = show._prefect_ui(result), show._mlflow_ui(result)
    if is_up:
        expected = ("http://127.0.0.1:4300/runs/flow-run/f", "http://127.0.0.1:5300/#/experiments/1/runs/m")
        assert pages == expected
    else:
        assert all(page.startswith("tinker-flows up --no-engine\n") for page in pages)


@pytest.mark.parametrize(
    ("stopped", "commands"),
    [
        ("", ['sample       tinker-flows sample mine@final "PROMPT"']),
        (
            "The run stopped at a checkpoint before step 3: it would have cost $2 with step 3, but budget.usd is 1.",
            [
                "resume       tinker-flows resume mine budget.usd=MORE",
                'sample       tinker-flows sample mine "PROMPT"',
            ],
        ),
    ],
)
def test_a_stopped_run_has_no_final_checkpoint_to_sample_from(
    stopped: str,
    commands: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path))
    fields = dict.fromkeys(TrainResult.__dataclass_fields__, cast(Any, ""))
    fields |= {"run_name": "mine", "directory": f"{tmp_path}/runs/mine", "metrics": {}, "stopped": stopped}
    show.show_result(TrainResult(**fields))
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith(("resume", "sample"))] == commands
