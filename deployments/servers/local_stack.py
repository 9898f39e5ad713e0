"""State of `tinker-flows up`: one stack of services per project home, recorded in `up.json`."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from blocks.errors import StorageError, storage_error
from blocks.servers.logins import Login, permanent_secret
from blocks.servers.processes import free_port
from blocks.terminal import print_notice

# Services of a killed `up` need up to this long to stop: 45 s for the runs of the worker, then 45 s for the worker.
SHUTDOWN_LIMIT_S = 100.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """URL and log file of a service."""

    name: str
    url: str
    log: str


@dataclass(frozen=True, slots=True)
class LocalStack:
    """Services started by one `tinker-flows up`; its fields are the keys of `up.json`.

    Attributes:
        pid: process id of `tinker-flows up`.
        endpoints: URLs and log files of the services.
        exports: environment variables that point a run at the services.
    """

    pid: int
    endpoints: tuple[Endpoint, ...]
    exports: Mapping[str, str]


@contextmanager
def stack_lock(home: Path) -> Iterator[TextIO]:
    """Lock `up.json` of a project home, so that the home has one stack; yields the file to record the stack in.

    Services inherit the open file and so keep the lock: after a kill -9 the next `up` waits until they have stopped.

    Raises:
        StorageError: another `up` holds the lock (the message lists its services), or the file cannot be opened.
    """
    path = home / "up.json"
    try:
        path.touch(mode=0o600)  # the file contains the key of the engine and the login of the servers
        file = path.open("r+")
    except OSError as error:
        raise storage_error("open", path, error) from error
    with file:
        _acquire(file)
        try:
            record_stack(file, LocalStack(os.getpid(), (), {}))
            yield file
        finally:
            file.truncate(0)


def record_stack(file: TextIO, stack: LocalStack) -> None:
    """Write the stack to its lock file, where a second `up` reads it.

    Raises:
        StorageError: the file cannot be written.
    """
    file.truncate(0)
    try:
        os.pwrite(file.fileno(), json.dumps(asdict(stack)).encode(), 0)  # unbuffered: nothing is left for `close`
    except OSError as error:
        raise storage_error("write", Path(file.name), error) from error


def engine_key(home: Path) -> str:
    """Return the engine's API key of a project home.

    Raises:
        StorageError: the key file cannot be written.
    """
    return permanent_secret(home / "engine.key", "tml-")


def choose_port(preferred: int) -> int:
    """Return the preferred port if it is free, or another free port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a recently closed port counts as free
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            return free_port()
    return preferred


def print_stack(stack: LocalStack, login: Login, console: Console) -> None:
    """Print the services, the login for a browser and the variables to export in another terminal."""
    table = Table(title="tinker-flows up", title_justify="left")
    for column in ("service", "URL", "log"):
        table.add_column(column, overflow="fold")
    for endpoint in stack.endpoints:
        table.add_row(endpoint.name, endpoint.url, Path(endpoint.log).name)
    console.print(table)
    console.print(
        f"In a browser, log in to Prefect with {login.of_prefect} and to MLflow as user {login.user} with "
        f"the password {login.password}",
        soft_wrap=True,
    )
    console.print(f"The logs are in {Path(stack.endpoints[0].log).parent}. In another terminal, run:", soft_wrap=True)
    for name, value in stack.exports.items():
        console.print(f"export {name}={shlex.quote(value)}", soft_wrap=True)


def _acquire(file: TextIO) -> None:
    """Lock `up.json`; wait for the services of an `up` that was killed.

    Raises:
        StorageError: another `up` runs, or the services have not stopped within `SHUTDOWN_LIMIT_S`.
    """
    deadline = time.monotonic() + SHUTDOWN_LIMIT_S
    has_notified = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stack = _read_stack(file)
            if _is_alive(stack.pid):
                raise StorageError(_already_running(stack, file.name)) from None
            if time.monotonic() > deadline:
                raise StorageError(
                    f"Another `tinker-flows up` holds {file.name}, or services of one that has ended have not stopped "
                    f"within {SHUTDOWN_LIMIT_S:.0f} s: end their processes, or set TINKER_FLOWS_HOME to another "
                    "directory."
                ) from None
            if not has_notified:
                print_notice("Waiting for the services of the previous `tinker-flows up` to stop.")
            has_notified = True
            time.sleep(0.2)
        else:
            return


def _read_stack(file: TextIO) -> LocalStack:
    file.seek(0)
    try:
        fields = json.load(file)
        return LocalStack(
            fields["pid"], tuple(Endpoint(**endpoint) for endpoint in fields["endpoints"]), fields["exports"]
        )
    except (ValueError, KeyError, TypeError):  # another process is writing the file
        return LocalStack(0, (), {})


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0


def _already_running(stack: LocalStack, path: str) -> str:
    services = ", ".join(f"{endpoint.name} at {endpoint.url}" for endpoint in stack.endpoints) or "still starting"
    return (
        f"`tinker-flows up` already runs in this project home as process {stack.pid} ({services}): use its services "
        f"with the exports in {path}, stop it with Ctrl-C or kill, or set TINKER_FLOWS_HOME to another directory."
    )
