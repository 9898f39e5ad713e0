"""`tinker-flows doctor`: what is well, and what a run could not start with, each by a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_process import running_engine
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks.processes import free_port
from deployments.command_line import main

NAMES = ["versions", "home", "Tinker service", "API key", "Prefect", "MLflow", "storage"]


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An environment that names no service, and a new home."""
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    with temporary_settings({PREFECT_API_URL: None}):
        yield


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, tuple[bool, str]]]:
    """The exit status, and of each check whether it is well and what was found."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json", *arguments])
    checks = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in checks] == NAMES
    return int(ended.value.code or 0), {each["name"]: (each["ok"], each["found"]) for each in checks}


def test_a_machine_without_any_service_is_well(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, checks = doctor(capsys)
    assert status == 0
    assert all(ok for ok, _ in checks.values()), checks
    assert "each run starts for itself" in checks["Tinker service"][1]
    assert list((tmp_path / "home").iterdir()) == []


def test_servers_that_run_are_well(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    prefect_server: str,
    engine_url: str,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", engine_url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-any")
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        status, checks = doctor(capsys, "--storage", str(tmp_path / "elsewhere"))
    assert status == 0, checks
    assert checks["API key"] == (True, "accepted; the service trains tiny")
    assert checks["Prefect"][1].startswith(f"{prefect_server}, version 3.")
    assert "may lose" not in checks["Prefect"][1]
    assert not (tmp_path / "elsewhere").exists()


def test_what_does_not_answer_or_cannot_be_written_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    (tmp_path / "file").touch()
    with temporary_settings({PREFECT_API_URL: f"{gone}/api"}):
        status, checks = doctor(
            capsys, "--base-url", gone, "--tracking", gone, "--storage", str(tmp_path / "file" / "runs")
        )
    assert status == 1
    assert {name for name, (ok, _) in checks.items() if not ok} == set(NAMES) - {"versions", "home"}
    for name in ("Tinker service", "Prefect", "MLflow"):
        assert "does not answer" in checks[name][1]
    assert "Not a directory" in checks["storage"][1]


def test_a_wrong_key_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with running_engine(tmp_path / "engine", environment={"TINKER_ENGINE_API_KEY": "tml-right"}) as engine:
        monkeypatch.setenv("TINKER_BASE_URL", engine.url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
        status, checks = doctor(capsys)
        assert status == 1
        assert {name for name, (ok, _) in checks.items() if not ok} == {"API key"}
        assert "refused the API key (401)" in checks["API key"][1]


def test_a_package_of_another_version_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metadata = tmp_path / "tinker_flows-9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tinker-flows\nVersion: 9\nRequires-Dist: prefect<3\nRequires-Dist: absent-one\n"
        "Requires-Dist: absent-extra; extra == 'ray'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    status, checks = doctor(capsys)
    assert status == 1
    ok, found = checks["versions"]
    assert not ok
    assert "has to be <3; absent-one is not installed: call `make install`" in found
