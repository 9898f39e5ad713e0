"""Fixtures and options shared by all tests."""

from __future__ import annotations

import gc
import os
import random
import signal
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import pytest
from engine_process import EngineProcess, running_engine
from hypothesis import settings
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks.servers.processes import local_prefect_server
from flows.monitoring.drain import deliver_events

if TYPE_CHECKING:
    from prefect.flow_engine import FlowRunEngine

# Fixtures that start a server. Other tests that start a process carry the mark themselves.
PROCESS_FIXTURES = {"engine", "prefect_server", "s3", "own_engine", "server_url"}


# No deadline, because the speed of a shared machine varies. `make slow` runs the thorough profile.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        help="Seed of random kill moments. By default each test draws a new seed; a failed test prints it.",
    )
    parser.addoption("--no-processes", action="store_true", help="Fail a test that starts a process; for `make unit`.")


def _forbid_processes(event: str, _: object) -> None:
    if event in {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"}:
        raise RuntimeError("This test starts a process: mark it with pytest.mark.process.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if PROCESS_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("process")


@pytest.fixture(scope="session", autouse=True)
def processes_are_forbidden(pytestconfig: pytest.Config) -> None:
    """Forbid the start of processes for the rest of the session, under --no-processes."""
    if pytestconfig.getoption("--no-processes"):
        sys.addaudithook(_forbid_processes)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # collections while the tests are imported would take a fifth of the time
    # A background shell ignores SIGINT, and child processes inherit that; tests stop child processes with SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # They come by time and not by step, and tests compare all metrics of a run.
    os.environ["MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"] = "false"
    # A run creates seven HTTP clients, and each would parse all certificates for 12 ms.
    ssl.create_default_context = cache(ssl.create_default_context)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def moments(pytestconfig: pytest.Config) -> random.Random:
    """Random generator for kill moments; prints its seed, which `pytest --seed SEED` accepts."""
    seed = pytestconfig.getoption("--seed")
    if seed is None:
        seed = random.SystemRandom().randrange(10**6)
    print(f"Kill moments are random; repeat them with --seed {seed}")
    return random.Random(seed)


@pytest.fixture
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set an API key that every engine of the tests accepts."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Engine with the tiny model, shared by the whole test run; each test opens its own session."""
    with running_engine(tmp_path_factory.mktemp("engine")) as engine:
        yield engine


@pytest.fixture(scope="session")
def engine_url(engine: EngineProcess) -> str:
    """`base_url` of the shared engine, which accepts any API key that starts with tml-."""
    return engine.url


@contextmanager
def _one_heartbeat(engine: FlowRunEngine[..., object], join_on_exit: bool = True) -> Iterator[None]:
    engine._emit_flow_run_heartbeat(*engine._build_heartbeat_event_template())
    yield


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """API URL of a real Prefect server for the whole test run, active in this process.

    Flows of this process send one heartbeat: they would wait up to a second for Prefect's heartbeat thread to end.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prefect.flow_engine._send_heartbeats", _one_heartbeat)
        patch.setenv("TINKER_FLOWS_HOME", str(tmp_path_factory.mktemp("prefect-home")))
        with local_prefect_server() as url, temporary_settings({PREFECT_API_URL: url}):
            yield url
            deliver_events()
