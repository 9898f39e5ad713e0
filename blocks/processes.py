"""Local services that a run starts for itself: the engine and a Prefect server, each with a log file."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from blocks.errors import ServiceError, ServiceLostError, storage_error
from blocks.home import home, one_at_a_time

if TYPE_CHECKING:
    from blocks.service import TinkerService

GRACE_S = 15.0

# Untuned, a Prefect server on a small machine falls behind at some 30 task runs a second and then loses them.
_PREFECT_SERVER = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
}


@contextmanager
def local_engine(
    *, model: str, dtype: str, threads: int | None, deterministic: bool = False
) -> Iterator[TinkerService]:
    """A local Tinker service for one model, up until the block ends, under a key that nobody else has.

    Args:
        deterministic: whether what it samples is the same to the bit whatever it samples beside it.

    Raises:
        ServiceError: it could not start; the message holds the last line of its log.
    """
    key = f"tml-{secrets.token_urlsafe(24)}"
    command = [sys.executable, "-m", "engine", "--port", "0", "--exit-with-stdin", "--model", model, "--dtype", dtype]
    command += ["--state", str(home() / "engine")]
    command += ["--threads", str(threads)] if threads else []
    command += ["--deterministic"] if deterministic else []
    log = log_file("engine")
    print(f"Starting the local engine with {model} (log: {log})", file=sys.stderr)
    with running(command, log, {"TINKER_ENGINE_API_KEY": key}) as process:
        url = _announced_url(process, log)
        with _raising_when_it_ends(process, log):
            from blocks.service import TinkerService  # the SDK takes seconds to import, and other services need none

            yield TinkerService.model_validate({"base_url": url, "api_key": key})


@contextmanager
def local_prefect_server() -> Iterator[str]:
    """A Prefect server on this project's own database, up until the block ends; its API's URL.

    Raises:
        ServiceError: it could not start; the message holds the last line of its log.
    """
    port = free_port()
    log = log_file("prefect")
    print(f"Starting a Prefect server for this run (log: {log})", file=sys.stderr)
    url = f"http://127.0.0.1:{port}/api"
    with ExitStack() as stack:
        with one_at_a_time(home() / ".prefect.lock"):  # the first start makes the tables
            env = {**prefect_server_env(), "PREFECT_API_URL": url}  # where its UI looks for it
            process = stack.enter_context(running(supervised(prefect_server(port)), log, env))
            _wait_until_healthy(process, f"{url}/health", log)
        yield url


def prefect_server(port: int) -> list[str]:
    """The command of a Prefect server that only this machine can reach; it needs `prefect_server_env`."""
    return [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]


def prefect_server_env() -> dict[str, str]:
    """The settings of a Prefect server that keeps up with training, on a SQLite file in the project's home."""
    database = f"sqlite+aiosqlite:///{home() / 'prefect.db'}"
    return {"PREFECT_API_DATABASE_CONNECTION_URL": database, **_PREFECT_SERVER}


def free_port() -> int:
    """A TCP port that was free on the loopback a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def log_file(name: str) -> Path:
    """A new, empty file for what a service writes, in the project's home.

    Raises:
        StorageError: it cannot be made.
    """
    folder = home() / "logs"
    try:
        folder.mkdir(exist_ok=True)
        started = time.strftime("%Y%m%d-%H%M%S")
        descriptor, path = tempfile.mkstemp(prefix=f"{name}-{started}-", suffix=".log", dir=folder)
    except OSError as error:
        raise storage_error("make a log in", folder, error) from error
    os.close(descriptor)
    return Path(path)


def supervised(command: Sequence[str], grace_s: float = GRACE_S, *, children_first: bool = False) -> list[str]:
    """The command that ends another one, and all that it started, when its standard input is closed.

    Args:
        grace_s: how long they may take to end in good order, before they are killed.
        children_first: end what it started before itself, in as long a time.
    """
    options = [f"--grace={grace_s:g}", *(["--children-first"] if children_first else [])]
    return [sys.executable, str(Path(__file__).with_name("supervise.py")), *options, *command]


@contextmanager
def running(
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    *,
    grace_s: float = GRACE_S,
    cwd: Path | None = None,
    keeps: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stops when its standard input is closed: here at the end, or by the kernel when we are gone.

    Args:
        grace_s: how long it may take for that, before it is killed.
        keeps: open files that it has, too.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            cwd=cwd,
            pass_fds=keeps,
            env={**os.environ, **env},
            # A Ctrl-C in the terminal reaches the run alone, which then stops this in good order.
            start_new_session=True,
        )
    with process:
        assert process.stdin is not None
        try:
            yield process
        finally:
            process.stdin.close()
            try:
                process.wait(grace_s + 5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _raising_when_it_ends(process: subprocess.Popen[bytes], log: Path) -> Iterator[None]:
    """Raise in the main thread when the engine ends under it: the SDK would wait for its answers for ever."""

    def check(*_: object) -> None:
        if process.poll() is not None:
            raise ServiceLostError(
                f"The local engine ended while it was in use (status {process.returncode}, log: {log}): "
                "start the same command again; it resumes from the last checkpoint."
            )

    if threading.current_thread() is not threading.main_thread():  # only that one can have signal handlers
        yield
        return
    before = signal.signal(signal.SIGCHLD, check)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _announced_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """The URL that the engine prints once it serves; loading a model, or its download, may take any time."""
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(b"http://"):
                return line.decode().strip()
    except BaseException:
        process.terminate()  # while it loads, it does not look at its standard input
        raise
    raise start_error("engine", log)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 180
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.05)
    raise start_error("Prefect server", log)


def start_error(name: str, log: Path) -> ServiceError:
    """The sentence for a service that ended before it served: what its log says last."""
    lines = log.read_text(errors="replace").strip().splitlines() or ["it wrote nothing"]
    # What ends a traceback says more than what a server says when it ends.
    why = next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception): ", line)), lines[-1])
    return ServiceError(f"The local {name} did not start: {why.strip()} (log: {log})")
