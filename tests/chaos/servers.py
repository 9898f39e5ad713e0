"""Services of a run as processes that can be killed with kill -9 and restarted on the same port and files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
from s3_server import ACCESS_KEY, SECRET_KEY, s3_command, s3_ports, server_ports

from blocks.errors import ServiceError
from blocks.servers import supervise
from blocks.servers.processes import prefect_server_env
from blocks.urls import check_reachable
from chaos.proxy import Proxies, Proxy
from chaos.schedule import GRADERS, SERVERS

# Environment variable of every process of the test; child processes inherit it.
MARK = "TINKER_FLOWS_CHAOS"
BUCKET = "runs"


def processes_of(mark: str) -> list[int]:
    """Return the pids of the running processes whose mark starts with `mark`."""
    prefix = f"{MARK}={mark}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # a process of another user, or one that has just ended
                continue
            if any(variable.startswith(prefix) for variable in variables):
                pids.append(int(entry.name))
    return pids


def send_signal(mark: str, number: int) -> None:
    """Send a signal to every process with a mark."""
    for pid in processes_of(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_9(mark: str) -> None:
    """Kill every process with a mark and wait until all have ended."""
    while processes_of(mark):
        send_signal(mark, signal.SIGKILL)
        time.sleep(0.01)


@dataclass(slots=True)
class Server:
    """Server that can be killed and restarted on the same port and files.

    Attributes:
        log: output file.
        restart_at: time of the next start on the monotonic clock; None while the server runs.
    """

    name: str
    mark: str
    command: Sequence[str | Path]
    env: Mapping[str, str]
    health: str
    log: Path
    restart_at: float | None = None
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        self.restart_at = None
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                # The supervisor stops the server when this process ends, even by kill -9.
                [sys.executable, supervise.__file__, *self.command],
                cwd=self.log.parent,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.env, MARK: self.mark},
                start_new_session=True,
            )

    def kill(self, downtime_s: float) -> None:
        kill_9(self.mark)
        self._reap()
        self.restart_at = time.monotonic() + downtime_s

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._reap()

    def is_up(self) -> bool:
        if self.restart_at is not None:
            return False
        assert self.process.poll() is None, f"{self.name} exited unexpectedly: {_tail(self.log)}"
        return True

    def wait(self) -> None:
        """Wait until the server responds."""
        deadline = time.monotonic() + 300
        while self.is_up():
            try:
                check_reachable(self.name, self.health, 5, "see its log")
            except ServiceError:
                assert time.monotonic() < deadline, f"{self.name} does not respond: {_tail(self.log)}"
                time.sleep(0.1)
            else:
                return

    def _reap(self) -> None:
        with self.process:
            pass


@dataclass(frozen=True, slots=True)
class Testbed:
    """Servers of the runs, each behind its own proxy.

    Attributes:
        folder: folder of all files.
        mark: common prefix of the marks of all processes.
        ports: ports of the servers by name; runs use the ports of the proxies instead.
    """

    folder: Path
    mark: str
    servers: Mapping[str, Server]
    proxies: Mapping[str, Proxy]
    ports: Mapping[str, int]

    def url(self, name: str, *, direct: bool = False) -> str:
        return f"http://127.0.0.1:{self.ports[name] if direct else self.proxies[name].port}"

    def restart_due(self) -> None:
        """Restart the killed servers whose downtime is over."""
        for server in self.servers.values():
            if server.restart_at is not None and time.monotonic() >= server.restart_at:
                server.start()

    def restart_all(self) -> None:
        """Restart every killed server and wait until all servers respond."""
        for server in self.servers.values():
            if server.restart_at is not None:
                server.start()
        for server in self.servers.values():
            server.wait()

    def bucket(self) -> fsspec.AbstractFileSystem:
        return fsspec.filesystem(
            "s3", key=ACCESS_KEY, secret=SECRET_KEY, endpoint_url=self.url("s3", direct=True), use_listings_cache=False
        )


@contextmanager
def running_testbed(folder: Path) -> Iterator[Testbed]:
    """Start every server with empty data; stop the servers when the block ends."""
    mark = f"{folder}:"
    s3 = s3_ports()
    names = (*SERVERS, *GRADERS)
    ports = dict(zip(names, server_ports(len(names)), strict=True)) | {"s3": s3["s3.port"]}
    servers = {server.name: server for server in _servers(folder, mark, ports, s3)}
    proxies = {name: Proxy(port, ports[name]) for name, port in zip(servers, server_ports(len(servers)), strict=True)}
    with ExitStack() as stack:
        stack.callback(kill_9, mark)
        for server in servers.values():
            server.start()
            stack.callback(server.stop)
        testbed = Testbed(folder, mark, servers, stack.enter_context(Proxies(proxies)).by_name, ports)
        testbed.restart_all()
        testbed.bucket().mkdirs(BUCKET, exist_ok=True)
        yield testbed


def _servers(folder: Path, mark: str, ports: Mapping[str, int], s3: dict[str, int]) -> Iterator[Server]:
    def server(name: str, command: Sequence[str | Path], env: Mapping[str, str], health: str) -> Server:
        server_folder = folder / name
        server_folder.mkdir(parents=True, exist_ok=True)
        url = f"http://127.0.0.1:{ports[name]}{health}"
        home = {
            "TINKER_FLOWS_HOME": str(folder / "home"),
            "PREFECT_HOME": str(folder / "prefect"),
            "TMPDIR": str(server_folder),
        }
        return Server(name, f"{mark}{name}", command, home | dict(env), url, server_folder / f"{name}.log")

    python = [sys.executable, "-m"]
    loopback = ["--host", "127.0.0.1", "--port"]
    engine = [*python, "engine", "--model", "tiny", "--threads", "1", "--deterministic"]
    engine += ["--state", str(folder / "engine" / "state")]
    yield server("engine", [*engine, "--port", str(ports["engine"])], _import_path(), "/api/v1/healthz")
    database = {"PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder / 'prefect' / 'prefect.db'}"}
    prefect = [*python, "blocks.servers.prefect_server", "server", "start", *loopback, str(ports["prefect"])]
    yield server("prefect", prefect, prefect_server_env() | database, "/api/health")
    store = ["--backend-store-uri", f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}", "--workers", "1"]
    artifacts = ["--artifacts-destination", str(folder / "mlflow" / "artifacts")]
    mlflow = [*python, "mlflow", "server", *loopback, str(ports["mlflow"]), *store, *artifacts]
    yield server("mlflow", mlflow, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}, "/health")
    command, env = s3_command(folder / "s3", s3)
    yield server("s3", command, env, "/")
    for name in GRADERS:
        command = [*python, "chaos.graders", str(ports[name])]
        yield server(name, command, {"PYTHONPATH": str(Path(__file__).parents[1])}, "/")


def _import_path() -> dict[str, str]:
    root = Path(supervise.__file__).parents[2]
    return {"PYTHONPATH": str(root)}


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]
