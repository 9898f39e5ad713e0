"""Local services that a run starts for itself: the engine and a Prefect server, each with a log file."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

from blocks.errors import ServiceError
from blocks.home import home

# Untuned, a Prefect server on a small machine falls behind at some 30 task runs a second and then loses them.
_PREFECT_SERVER = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True, slots=True)
class LocalService:
    """A service that is up: where it answers and where it writes its log."""

    url: str
    log: Path


@contextmanager
def local_engine(*, model: str, dtype: str, threads: int | None) -> Iterator[LocalService]:
    """A local Tinker service for one model, up until the block ends.

    Raises:
        ServiceError: it could not start; the message holds the last line of its log.
    """
    port = free_port()
    command = [sys.executable, "-m", "engine", "--port", str(port), "--model", model, "--dtype", dtype]
    command += ["--state", str(home() / "engine")]
    command += ["--threads", str(threads)] if threads else []
    with _process("engine", command, f"http://127.0.0.1:{port}", "/api/v1/healthz") as service:
        yield service


@contextmanager
def local_prefect_server() -> Iterator[LocalService]:
    """A Prefect server on this project's own database, up until the block ends."""
    port = free_port()
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with _process("prefect", command, f"http://127.0.0.1:{port}/api", "/health", prefect_server_env()) as service:
        yield service


def prefect_server_env() -> dict[str, str]:
    """The settings of a Prefect server that keeps up with training, on a SQLite file in the project's home."""
    database = f"sqlite+aiosqlite:///{home() / 'prefect.db'}"
    return {"PREFECT_API_DATABASE_CONNECTION_URL": database, **_PREFECT_SERVER}


def free_port() -> int:
    """A TCP port that was free on the loopback a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _process(
    name: str, command: list[str], url: str, health: str, env: Mapping[str, str] | None = None
) -> Iterator[LocalService]:
    log = home() / "logs" / f"{name}-{os.getpid()}.log"
    log.parent.mkdir(exist_ok=True)
    supervise = [sys.executable, str(Path(__file__).with_name("supervise.py"))]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*supervise, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
        )
    try:
        _wait_until_healthy(process, name, url + health, log)
        yield LocalService(url, log)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], name: str, url: str, log: Path) -> None:
    deadline = time.monotonic() + 180
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            last = (log.read_text(errors="replace").strip().splitlines() or ["it wrote nothing"])[-1]
            raise ServiceError(f"The local {name} did not start: {last} (log: {log})")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.05)
