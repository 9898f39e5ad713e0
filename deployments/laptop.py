"""What `tinker-flows up` has started: one at a time in a project's home, noted there, and shown to a person."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from blocks.errors import StorageError, storage_error
from blocks.processes import free_port

# Whoever was killed leaves services that take so long to end.
LAST_ONE_ENDS_S = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a service is, and what it writes."""

    name: str
    url: str
    log: str


@dataclass(frozen=True, slots=True)
class Laptop:
    """All that was started.

    Attributes:
        pid: of the process that ends it.
        exports: the environment variables by which a run finds it.
    """

    pid: int
    places: tuple[Place, ...]
    exports: Mapping[str, str]


@contextmanager
def only_one(home: Path) -> Iterator[TextIO]:
    """Hold the home's one place for an `up`; what it has started is to be noted in the file, which is its lock.

    Whatever has the file too keeps the place: the next one waits until the services of one that was killed have ended.

    Raises:
        StorageError: another one is there; the message says where its services are.
    """
    path = home / "up.json"
    try:
        path.touch(mode=0o600)  # it holds the engine's key
        file = path.open("r+")
    except OSError as error:
        raise storage_error("open", path, error) from error
    with file:
        _take(file)
        note(file, Laptop(os.getpid(), (), {}))
        try:
            yield file
        finally:
            file.truncate(0)


def note(file: TextIO, laptop: Laptop) -> None:
    """Write down what was started, for whoever comes second."""
    file.seek(0)
    file.truncate()
    json.dump(asdict(laptop), file)
    file.flush()


def engine_key(home: Path) -> str:
    """The key to the engine of this home: the same every day, so that a terminal's exports stay good.

    Raises:
        StorageError: it cannot be kept.
    """
    path = home / "engine.key"
    try:
        path.touch(mode=0o600)
        key = path.read_text()
        if not key:
            key = f"tml-{secrets.token_urlsafe(24)}"
            path.write_text(key)
    except OSError as error:
        raise storage_error("keep the engine's key in", path, error) from error
    return key


def port_for(preferred: int) -> int:
    """The port that a service usually has where it is free, or another."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # free is also what somebody has just left
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            return free_port()
    return preferred


def show(laptop: Laptop, console: Console) -> None:
    """Print where everything is, and what another terminal needs."""
    table = Table(title="tinker-flows up", title_justify="left")
    for column in ("service", "where", "log"):
        table.add_column(column, overflow="fold")
    for place in laptop.places:
        table.add_row(place.name, place.url, Path(place.log).name)
    console.print(table)
    console.print(f"The logs are in {Path(laptop.places[0].log).parent}. In another terminal:", soft_wrap=True)
    for name, value in laptop.exports.items():
        console.print(f"export {name}={shlex.quote(value)}", soft_wrap=True)


def _take(file: TextIO) -> None:
    deadline = time.monotonic() + LAST_ONE_ENDS_S
    said = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            laptop = _noted(file)
            if _is_there(laptop.pid) or time.monotonic() > deadline:
                raise StorageError(_refusal(laptop, file.name)) from None
            if not said:
                print("The services of the last `tinker-flows up` are ending; it is waited for them.", file=sys.stderr)
            said = True
            time.sleep(0.2)
        else:
            return


def _noted(file: TextIO) -> Laptop:
    file.seek(0)
    try:
        fields = json.load(file)
        return Laptop(fields["pid"], tuple(Place(**each) for each in fields["places"]), fields["exports"])
    except (ValueError, KeyError, TypeError):  # it is being written
        return Laptop(0, (), {})


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0


def _refusal(laptop: Laptop, path: str) -> str:
    where = ", ".join(f"{place.name} at {place.url}" for place in laptop.places) or "and is still starting"
    return (
        f"`tinker-flows up` runs in this home already, as process {laptop.pid} ({where}): use that one, whose exports "
        f"are in {path}, stop it with Ctrl-C or kill, or set TINKER_FLOWS_HOME to another directory."
    )
