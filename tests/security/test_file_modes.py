"""Files of a project home, its runs and its servers are their owner's alone; a cache of models is readable by all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from engine_process import API_KEY
from sft_config import sft_fields

from blocks import RunStorage
from blocks.files.local import home
from blocks.servers.processes import local_engine, local_prefect_server, new_log_file
from blocks.tracking import MLflowTracking
from engine.model_cache import make_once
from flows.config.train import SftConfig
from flows.sft import sft


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Umask under which every file is readable and writable by all."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def exposed(folder: Path) -> list[str]:
    """Paths in a folder that other users can reach: neither they nor a folder on the way to them are private."""
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if mode(Path(place) / name) & 0o077]
        found += [str(Path(place) / name) for name in (*folders, *files) if mode(Path(place) / name) & 0o077]
    return found


@pytest.mark.usefixtures("open_umask")
def test_new_files_are_their_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "project" / "home"))
    log = new_log_file("engine")
    with RunStorage(url=str(tmp_path / "elsewhere" / "runs")).run_directory("mine") as directory:
        directory.write_bytes("config.json", b"{}")
        directory.append_line("checkpoints.jsonl", "{}")
    MLflowTracking(tracking_uri=f"sqlite:///{tmp_path}/databases/mlflow.db").get_client()
    run = tmp_path / "elsewhere" / "runs" / "mine"
    for folder in (home(), log.parent, run.parent, run, tmp_path / "databases", home() / "mlflow-artifacts"):
        assert mode(folder) == 0o700, folder
    files = [log, *run.iterdir(), tmp_path / "databases" / "mlflow.db"]
    assert len(files) == 5
    assert [path for path in files if mode(path) != 0o600] == []


def test_a_cache_of_models_is_readable_by_all(tmp_path: Path) -> None:
    def make(directory: Path) -> None:
        (directory / "config.json").touch(mode=0o600)

    before = os.umask(0o077)
    try:
        model = make_once(tmp_path / "cache" / "model-1", make)
    finally:
        os.umask(before)
    assert [mode(path) for path in (model.parent, model, model / "config.json")] == [0o755, 0o755, 0o644]


@pytest.mark.process
@pytest.mark.usefixtures("open_umask", "prefect_server")
def test_a_run_and_its_servers_expose_nothing(tmp_path: Path, engine_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home exists and is open, so that each file in it has to protect itself."""
    place = tmp_path / "home"
    place.mkdir()
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(place))
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    fields = sft_fields(tmp_path, "private", f"sqlite:///{place}/mlflow.db", engine_url)
    sft(SftConfig.model_validate(fields | {"num_steps": 1, "eval_every": 0}))
    with local_prefect_server() as url, local_engine(model="tiny", dtype="float32", threads=1):
        assert httpx.get(f"{url}/health").json() is True
    names = {path.name for path in place.rglob("*")}
    assert {"prefect.db", "mlflow.db", "logs", "engine"} <= names
    cache = str(place / "cache")
    assert [path for path in exposed(place) if not path.startswith(cache)] == []
    assert exposed(tmp_path / "runs") == []
