"""Local services that a run starts on its own: the engine and a Prefect server, each with a log file."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

from blocks.errors import ServiceError, ServiceLostError, storage_error
from blocks.files.local import file_lock, home, private_folder
from blocks.servers.database_templates import PREFECT_TEMPLATE, is_missing
from blocks.servers.logins import USER, Login, password_file, server_login
from blocks.terminal import print_notice

if TYPE_CHECKING:
    from blocks.service import TinkerService

GRACE_S = 15.0

# With default settings, a Prefect server on a small machine falls behind at about 30 task runs per second and then
# loses task runs.
_PREFECT_SERVER_SETTINGS = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """Engine process, which may still be loading its model."""

    model: str
    process: subprocess.Popen[bytes]
    log: Path
    key: str

    @contextmanager
    def serving(self) -> Iterator[TinkerService]:
        """Wait until the engine serves and yield its service; tell the engine to stop when the block ends.

        After an error, this also waits until the engine has stopped, because the run may start another one.

        Raises:
            ServiceError: the engine did not start; the message contains the last error in its log.
            ServiceLostError: the engine exited during the block; raised only in the main thread.
        """
        assert self.process.stdin is not None
        print_notice(f"Starting the local engine with {self.model} (log: {self.log})")
        url = _announced_url(self.process, self.log)
        try:
            with _raise_on_exit(self.process, self.log):
                from blocks.service import TinkerService  # imports Prefect, which takes a second

                yield TinkerService.model_validate({"base_url": url, "api_key": self.key})
        except BaseException:
            self.process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
            raise
        self.process.stdin.close()


@contextmanager
def starting_engine(
    *, model: str, dtype: str, threads: int | None, deterministic: bool = False, device: str = "cpu"
) -> Iterator[LocalEngine]:
    """Start a local Tinker service for one model, with a random API key; it ends with the block.

    Args:
        deterministic: sample the same tokens for a request regardless of concurrent requests.
    """
    key = f"tml-{secrets.token_urlsafe(24)}"
    command = [sys.executable, "-m", "engine", "--port", "0", "--exit-with-stdin", "--model", model, "--dtype", dtype]
    command += ["--state", str(home() / "engine")]
    command += ["--threads", str(threads)] if threads else []
    command += ["--deterministic"] if deterministic else []
    command += ["--device", device]
    log = new_log_file("engine")
    with managed_process(command, log, {"TINKER_ENGINE_API_KEY": key}) as process:
        try:
            yield LocalEngine(model, process, log, key)
        except BaseException:
            process.terminate()  # the engine does not watch its standard input while it loads
            raise


@contextmanager
def local_engine(
    *, model: str, dtype: str, threads: int | None, deterministic: bool = False, device: str = "cpu"
) -> Iterator[TinkerService]:
    """Run a local Tinker service until the block ends; the parameters are those of `starting_engine`.

    Raises:
        ServiceError: the engine did not start; the message contains the last error in its log.
    """
    starting = starting_engine(model=model, dtype=dtype, threads=threads, deterministic=deterministic, device=device)
    with starting as engine, engine.serving() as service:
        yield service


@dataclass(frozen=True, slots=True)
class PrefectServer:
    """Prefect server of a run.

    Attributes:
        url: URL of its API.
        login: login of its API, `USER:PASSWORD`.
        log: its log file.
        wait: waits until the server responds; raises a ServiceError with the last error of its log if it does not.
    """

    url: str
    login: str
    log: Path
    wait: Callable[[], None]


@dataclass(frozen=True, slots=True)
class RunningPrefectServer:
    """Prefect server of `tinker-flows up`: URL of its API, its login `USER:PASSWORD`, and URL of the MLflow server."""

    url: str
    login: str
    mlflow_url: str


def running_prefect_server() -> RunningPrefectServer | None:
    """Return the Prefect server that `tinker-flows up` runs in this project home, or None."""
    try:
        with (home() / "up.json").open("rb") as file:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None  # nobody holds the lock, so the `up` that wrote the file has ended
            exports = json.load(file)["exports"]
            names = ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_URI")
            server = RunningPrefectServer(*(exports[name] for name in names))
        with urllib.request.urlopen(f"{server.url}/health", timeout=5):
            return server
    except (
        OSError,
        HTTPException,
        ValueError,
        KeyError,
        TypeError,
    ):  # no `up` runs here, or it is starting or stopping
        return None


@contextmanager
def starting_prefect_server() -> Iterator[PrefectServer]:
    """Start the Prefect server of a run on the database in the project home; it stops when the block ends.

    It requires the login of `tinker-flows up`, because its database has the deployments and work pools of `up`.
    """
    login = server_login(home())
    with _starting_prefect_server(login) as server:

        def wait() -> None:
            password = shlex.quote(str(password_file(home())))
            print_notice(
                f"Starting a Prefect server for this run at {server.url.removesuffix('/api')} (log in with "
                f"{USER}:$(cat {password}); log: {server.log})"
            )
            server.wait()

        yield PrefectServer(server.url, login.of_prefect, server.log, wait)


@contextmanager
def local_prefect_server() -> Iterator[str]:
    """Run a Prefect server without a login until the block ends; yields the URL of its API. For tests and benchmarks.

    Raises:
        ServiceError: the server did not start; the message contains the last error in its log.
    """
    with _starting_prefect_server(None) as server:
        server.wait()
        yield server.url


@dataclass(frozen=True, slots=True)
class _StartingPrefectServer:
    url: str
    log: Path
    wait: Callable[[], None]


@contextmanager
def _starting_prefect_server(login: Login | None) -> Iterator[_StartingPrefectServer]:
    """Start a Prefect server until the block ends; the caller calls `wait` before it uses the server.

    `wait` also releases the lock on the database.
    """
    port = free_port()
    log = new_log_file("prefect")
    url = _prefect_url(port)
    with ExitStack() as lock:
        lock.enter_context(file_lock(home() / ".prefect.lock"))  # the first start creates the tables
        is_new = is_missing(prefect_database())
        env = prepare_prefect_database() | (prefect_login_env(port, login) if login else {"PREFECT_API_URL": url})
        command = supervised_command(prefect_server_command(port), num_restarts=3)
        with managed_process(command, log, env) as process:

            def wait() -> None:
                _wait_until_healthy(process, f"{url}/health", log)
                if is_new:
                    PREFECT_TEMPLATE.save(prefect_database())
                lock.close()

            yield _StartingPrefectServer(url, log, wait)


def _prefect_url(port: int) -> str:
    return f"http://127.0.0.1:{port}/api"


def prefect_login_env(port: int, login: Login) -> dict[str, str]:
    """Return the settings of a Prefect server that requires a login and refuses the pages of other origins."""
    url = _prefect_url(port)
    return {
        "PREFECT_API_URL": url,  # the UI uses this URL
        "PREFECT_SERVER_API_AUTH_STRING": login.of_prefect,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"{url.removesuffix('/api')},http://localhost:{port}",
    }


def prefect_server_command(port: int) -> list[str]:
    """Return the command of a Prefect server on the loopback interface; run it with `prefect_server_env`."""
    server = [sys.executable, "-m", "blocks.servers.prefect_server", "server", "start"]
    return [*server, "--host", "127.0.0.1", "--port", str(port)]


def prefect_server_env() -> dict[str, str]:
    """Return the settings of a Prefect server that keeps up with training, on a SQLite file in the project home."""
    return {
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{prefect_database()}",
        **_PREFECT_SERVER_SETTINGS,
    }


def prefect_database() -> Path:
    """Return the SQLite file of the Prefect servers of the project home."""
    return home() / "prefect.db"


def prepare_prefect_database() -> dict[str, str]:
    """Create a missing database from the template; return `prefect_server_env`.

    Migrations are turned off if the database is current.

    The caller holds the lock `.prefect.lock` of the project home until the server has started.
    """
    is_current = PREFECT_TEMPLATE.prepare(prefect_database())
    return prefect_server_env() | ({"PREFECT_API_DATABASE_MIGRATE_ON_START": "false"} if is_current else {})


def free_port() -> int:
    """Return a TCP port that was free on the loopback interface at the time of the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def new_log_file(name: str) -> Path:
    """Create an empty log file for a service in the project home.

    Raises:
        StorageError: the file cannot be created.
    """
    folder = home() / "logs"
    try:
        private_folder(folder)
        started = time.strftime("%Y%m%d-%H%M%S")
        descriptor, path = tempfile.mkstemp(prefix=f"{name}-{started}-", suffix=".log", dir=folder)
    except OSError as error:
        raise storage_error("create a log file in", folder, error) from error
    os.close(descriptor)
    return Path(path)


def supervised_command(
    command: Sequence[str], grace_s: float = GRACE_S, *, children_first: bool = False, num_restarts: int = 0
) -> list[str]:
    """Wrap a command in a supervisor that stops it and all its descendants when standard input is closed.

    Args:
        grace_s: seconds the processes have to exit cleanly before they are killed.
        children_first: stop the command's children before the command itself; they too have `grace_s` seconds.
        num_restarts: how often the command is started again after a signal has killed it.
    """
    options = [f"--grace={grace_s:g}", *(["--children-first"] if children_first else []), f"--restarts={num_restarts}"]
    return [sys.executable, str(Path(__file__).with_name("supervise.py")), *options, *command]


@contextmanager
def managed_process(
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    *,
    grace_s: float = GRACE_S,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that stops when its standard input is closed: at the end of the block, or when the caller dies.

    Files that the process creates are readable only by their owner.

    Args:
        grace_s: seconds the process has to stop; 5 s later it is killed.
        pass_fds: open file descriptors that the process inherits.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            cwd=cwd,
            pass_fds=pass_fds,
            env={**os.environ, **env},
            umask=0o077,
            # Ctrl-C in the terminal reaches only the run, which then stops the child process cleanly.
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
def _raise_on_exit(process: subprocess.Popen[bytes], log: Path) -> Iterator[None]:
    """Raise in the main thread if the engine exits inside the block: the SDK would wait for its responses forever."""

    def check(*_: object) -> None:
        if process.poll() is not None:
            raise ServiceLostError(
                f"The local engine exited during the run (status {process.returncode}, log: {log}): the run "
                "restarts from its last checkpoint; if it ends instead, the same command resumes it."
            )

    if threading.current_thread() is not threading.main_thread():  # only the main thread can have signal handlers
        yield
        return
    previous_handler = signal.signal(signal.SIGCHLD, check)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, previous_handler)


def _announced_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the URL that the engine prints once it serves; downloading and loading a model has no time limit."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(b"http://"):
            return line.decode().strip()
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


# Parts of errors at the start of a server with a database in the project home, each with what to do.
_DATABASE_REMEDIES = {
    "Can't locate revision": "a newer version has written {database}: upgrade the package, or move the file away",
    "out-of-date database schema": "another version has written {database}: install that one, or move the file away",
    "not a database": "{database} is damaged: replace it by a backup, or move it away",
    "malformed": "{database} is damaged: replace it by a backup, or move it away",
    "readonly database": "make {database} and its folder writable",
}


def start_error(name: str, log: Path) -> ServiceError:
    """Build the error for a service that did not start; the message quotes the last error or line of the log."""
    lines = log.read_text(errors="replace").strip().splitlines()
    if not lines:
        return ServiceError(
            f"The local {name} did not start, and its log {log} is empty: check the free space of that disk."
        )
    cause = next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception): ", line)), lines[-1])
    text = f"The local {name} did not start: {cause.strip()} (log: {log})"
    database = home() / ("mlflow.db" if "mlflow" in name.lower() else "prefect.db")
    remedy = next((remedy for part, remedy in _DATABASE_REMEDIES.items() if part in cause), "")
    return ServiceError(f"{text}: {remedy.format(database=database)}." if remedy else text)
