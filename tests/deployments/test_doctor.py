"""`tinker-flows doctor`: passed checks, and failed checks with an explanation."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from engine_process import running_engine
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks.servers.processes import free_port
from deployments.command_line import main

NAMES = ["versions", "home", "Tinker service", "API key", "Prefect", "MLflow", "storage"]


@pytest.fixture(autouse=True)
def no_services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Use an environment that selects no service, and a new project home."""
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    with temporary_settings({PREFECT_API_URL: None}):
        yield


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, tuple[bool, str]]]:
    """Run the command; return its exit status and the checks by name."""
    with pytest.raises(SystemExit) as exit_info:
        main(["doctor", "--json", *arguments])
    checks = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in checks] == NAMES
    return int(exit_info.value.code or 0), {check["name"]: (check["ok"], check["result"]) for check in checks}


def test_all_checks_pass_without_services(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, checks = doctor(capsys)
    assert status == 0
    assert all(ok for ok, _ in checks.values()), checks
    assert "each run starts its own engine" in checks["Tinker service"][1]
    assert list((tmp_path / "home").iterdir()) == []


def test_all_checks_pass_with_running_servers(
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


def test_a_damaged_database_of_prefect_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    database = tmp_path / "home" / "prefect.db"
    database.parent.mkdir()
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE flow (name TEXT)")
    assert doctor(capsys)[0] == 0
    database.write_bytes(b"not a database of SQLite" * 100)
    status, checks = doctor(capsys)
    assert status == 1
    assert checks["Prefect"] == (
        False,
        f"The database {database} cannot be used (file is not a database): make it writable, replace it by a backup, "
        "or move it away.",
    )


def test_unreachable_services_and_unwritable_storage_fail(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    unreachable = f"http://127.0.0.1:{free_port()}"
    (tmp_path / "file").touch()
    with temporary_settings({PREFECT_API_URL: f"{unreachable}/api"}):
        status, checks = doctor(
            capsys, "--base-url", unreachable, "--tracking", unreachable, "--storage", str(tmp_path / "file" / "runs")
        )
    assert status == 1
    assert {name for name, (ok, _) in checks.items() if not ok} == set(NAMES) - {"versions", "home"}
    for name in ("Tinker service", "Prefect", "MLflow"):
        assert "does not respond" in checks[name][1]
    assert "Not a directory" in checks["storage"][1]


@pytest.mark.process
def test_a_wrong_key_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with running_engine(tmp_path / "engine", environment={"TINKER_ENGINE_API_KEY": "tml-right"}) as engine:
        monkeypatch.setenv("TINKER_BASE_URL", engine.url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
        status, checks = doctor(capsys)
        assert status == 1
        assert {name for name, (ok, _) in checks.items() if not ok} == {"API key"}
        assert "rejected the API key (401)" in checks["API key"][1]


def test_a_wrong_package_version_fails(
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
    ok, message = checks["versions"]
    assert not ok
    assert "does not satisfy <3; absent-one is not installed: run `make install`" in message
