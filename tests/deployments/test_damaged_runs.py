"""`tinker-flows status` of a storage where the config.json of one run is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployments.command_line import main


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs that have not trained a step: `good`, and `bad`, whose config a test damages."""
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    for name in ("good", "bad"):
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        fields = {"run_name": name, "tracking": f"sqlite:///{tmp_path}/mlflow.db"}
        (directory / "config.json").write_text(json.dumps(fields))
    return tmp_path / "runs"


def test_other_runs_are_listed(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (storage / "bad" / "config.json").write_text('{"run_na')

    with pytest.raises(SystemExit) as exit_info:
        main(["status", "--json", "--storage", str(storage)])

    assert exit_info.value.code == 0
    bad, good = json.loads(capsys.readouterr().out)
    assert (good["run_name"], good["state"]) == ("good", "failed")
    assert (bad["run_name"], bad["state"], bad["step"]) == ("bad", "damaged", 0)
    assert str(storage / "bad" / "config.json") in bad["why"]

    with pytest.raises(SystemExit):
        main(["status", "--storage", str(storage)])
    shown = capsys.readouterr().out
    assert "good" in shown
    assert bad["why"] in " ".join(shown.split())
