"""The services of a run as processes that can be killed with -9 and come back where they were."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
from s3_server import ACCESS_KEY, SECRET_KEY, s3_command, s3_ports

from blocks import supervise
from blocks.errors import ServiceError
from blocks.processes import free_port, prefect_server_env
from blocks.reach import check_answers
from chaos.proxy import Proxies, Proxy

# In the environment of every process of ours, and so of all that it starts.
MARK = "TINKER_FLOWS_CHAOS"
BUCKET = "runs"


def processes_of(mark: str) -> list[int]:
    """The pids of the living processes that bear a mark, or one that goes on after it."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # another user's, or gone meanwhile
                continue
            if any(each.startswith(wanted) for each in variables):
                found.append(int(entry.name))
    return found


def kill_9(mark: str) -> None:
    """Kill every process that bears a mark, and return when they are gone."""
    while pids := processes_of(mark):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


@dataclass(slots=True)
class Server:
    """A server that can be killed and started again on the same port and files.

    Attributes:
        log: what it wrote.
        back_at: when it is to be started again, by the monotonic clock; None while it runs.
    """

    name: str
    mark: str
    command: Sequence[str | Path]
    env: Mapping[str, str]
    health: str
    log: Path
    back_at: float | None = None
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        self.back_at = None
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                # Stopped with this process, however that one ends.
                [sys.executable, supervise.__file__, *self.command],
                cwd=self.log.parent,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.env, MARK: self.mark},
                start_new_session=True,
            )

    def kill(self, away_s: float) -> None:
        kill_9(self.mark)
        self._reap()
        self.back_at = time.monotonic() + away_s

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._reap()

    def is_up(self) -> bool:
        if self.back_at is not None:
            return False
        assert self.process.poll() is None, f"{self.name} ended by itself: {_tail(self.log)}"
        return True

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + 300
        while self.is_up():
            try:
                check_answers(self.name, self.health, 5, "see its log")
            except ServiceError:
                assert time.monotonic() < deadline, f"{self.name} does not answer: {_tail(self.log)}"
                time.sleep(0.1)
            else:
                return

    def _reap(self) -> None:
        with self.process:
            pass


@dataclass(frozen=True, slots=True)
class Stage:
    """Where runs are played: four servers, each behind a proxy of its own.

    Attributes:
        folder: of everything that they leave.
        mark: of every process.
        ports: of the servers themselves, by name; a run knows those of the proxies.
    """

    folder: Path
    mark: str
    servers: Mapping[str, Server]
    proxies: Mapping[str, Proxy]
    ports: Mapping[str, int]

    def url(self, name: str, *, direct: bool = False) -> str:
        return f"http://127.0.0.1:{self.ports[name] if direct else self.proxies[name].port}"

    def revive(self) -> None:
        """Start what was killed, when its time has come."""
        for server in self.servers.values():
            if server.back_at is not None and time.monotonic() >= server.back_at:
                server.start()

    def revive_all(self) -> None:
        """Start what was killed and wait until every server answers."""
        for server in self.servers.values():
            if server.back_at is not None:
                server.start()
        for server in self.servers.values():
            server.wait()

    def bucket(self) -> fsspec.AbstractFileSystem:
        return fsspec.filesystem(
            "s3", key=ACCESS_KEY, secret=SECRET_KEY, endpoint_url=self.url("s3", direct=True), use_listings_cache=False
        )


@contextmanager
def running_stage(folder: Path) -> Iterator[Stage]:
    """Every server, up and empty; stopped when the block is left."""
    mark = f"{folder}:"
    s3 = s3_ports()
    ports = {name: free_port() for name in ("engine", "prefect", "mlflow")} | {"s3": s3["s3.port"]}
    servers = {each.name: each for each in _servers(folder, mark, ports, s3)}
    proxies = {name: Proxy(free_port(), ports[name]) for name in servers}
    with ExitStack() as stack:
        stack.callback(kill_9, mark)
        for server in servers.values():
            server.start()
            stack.callback(server.stop)
        stage = Stage(folder, mark, servers, stack.enter_context(Proxies(proxies)).of, ports)
        stage.revive_all()
        stage.bucket().mkdirs(BUCKET, exist_ok=True)
        yield stage


def _servers(folder: Path, mark: str, ports: Mapping[str, int], s3: dict[str, int]) -> Iterator[Server]:
    def server(name: str, command: Sequence[str | Path], env: Mapping[str, str], health: str) -> Server:
        where = folder / name
        where.mkdir(parents=True, exist_ok=True)
        url = f"http://127.0.0.1:{ports[name]}{health}"
        home = {
            "TINKER_FLOWS_HOME": str(folder / "home"),
            "PREFECT_HOME": str(folder / "prefect"),
            "TMPDIR": str(where),
        }
        return Server(name, f"{mark}{name}", command, home | dict(env), url, where / f"{name}.log")

    python = [sys.executable, "-m"]
    here = ["--host", "127.0.0.1", "--port"]
    engine = [*python, "engine", "--model", "tiny", "--threads", "1", "--deterministic"]
    engine += ["--state", str(folder / "engine" / "state")]
    yield server("engine", [*engine, "--port", str(ports["engine"])], _import_path(), "/api/v1/healthz")
    database = {"PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder / 'prefect' / 'prefect.db'}"}
    prefect = [*python, "prefect", "server", "start", *here, str(ports["prefect"])]
    yield server("prefect", prefect, prefect_server_env() | database, "/api/health")
    store = ["--backend-store-uri", f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}", "--workers", "1"]
    artifacts = ["--artifacts-destination", str(folder / "mlflow" / "artifacts")]
    mlflow = [*python, "mlflow", "server", *here, str(ports["mlflow"]), *store, *artifacts]
    yield server("mlflow", mlflow, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}, "/health")
    command, env = s3_command(folder / "s3", s3)
    yield server("s3", command, env, "/")


def _import_path() -> dict[str, str]:
    root = Path(supervise.__file__).parents[1]
    return {"PYTHONPATH": str(root)}


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]
