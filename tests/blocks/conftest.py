"""Fixtures for the tests of the blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from s3_server import S3Server, running_s3

from blocks import TinkerService
from blocks.servers.processes import local_engine


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Project home for one test."""
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """S3 server shared by the whole test run."""
    with running_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")  # the home, in which it finds its only log, is set for as long
def own_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerService]:
    """Engine as a run starts it, with a required key; the clean shutdown is checked at the end."""
    home = tmp_path_factory.mktemp("engine-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_FLOWS_HOME", str(home))
        with local_engine(model="tiny", dtype="float32", threads=1) as service:
            yield service
    assert not [child for child in psutil.Process().children() if f"{home}/engine" in child.cmdline()]
    (log,) = (home / "logs").iterdir()
    assert log.read_text().endswith("Stopped\n")
