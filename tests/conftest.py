"""Fixtures for every room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_process import EngineProcess, running_engine


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One engine on the tiny model for the whole test run; each test opens its own session on it."""
    with running_engine(tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.fixture(scope="session")
def engine_url(engine: EngineProcess) -> str:
    """The `base_url` of that engine; any API key that starts with tml- is good."""
    return engine.url
