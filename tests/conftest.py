"""Fixtures for every room."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from engine_process import EngineProcess, running_engine
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks.processes import local_prefect_server
from flows.recorded import deliver_events


def pytest_configure(config: pytest.Config) -> None:
    # Ignored where the tests run in the background, and so in what they start, which is to be stopped by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One engine on the tiny model for the whole test run; each test opens its own session on it."""
    with running_engine(tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.fixture(scope="session")
def engine_url(engine: EngineProcess) -> str:
    """The `base_url` of that engine; any API key that starts with tml- is good."""
    return engine.url


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API URL of one real Prefect server for the whole test run, in force in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_FLOWS_HOME", str(tmp_path_factory.mktemp("prefect-home")))
        with local_prefect_server() as url, temporary_settings({PREFECT_API_URL: url}):
            yield url
            deliver_events()
