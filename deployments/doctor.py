"""Checks of everything a run needs on this machine; a failed check says how to fix the problem."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from rich.table import Table
from rich.text import Text
from sqlalchemy import make_url

from blocks.errors import ConfigError, StorageError, TinkerFlowsError, reason
from blocks.files.local import home
from blocks.files.object_directory import ObjectDirectory
from blocks.prefect_errors import check_prefect_url, prefect_failures
from blocks.servers.database_templates import is_missing
from blocks.servers.processes import running_prefect_server
from blocks.service import TinkerService
from blocks.terminal import TextConsole
from blocks.urls import check_reachable
from flows.runs.blocks import service_at, storage_at, tracking_at

PACKAGE = "tinker-flows"
TIMEOUT_S = 20.0
MIN_FREE_GB = 2.0
RECORDER = "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    Attributes:
        name: subject of the check.
        ok: whether the check passed.
        result: detected state; for a failed check, the problem and its fix.
    """

    name: str
    ok: bool
    result: str


def show_checks(base_url: str, storage: str, tracking: str, as_json: bool) -> bool:
    """Print every check; return whether all passed."""
    checks = list(check_all(base_url, storage, tracking))
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        table = Table(title="tinker-flows doctor", title_justify="left")
        for column in ("", "check", "result"):
            table.add_column(column, overflow="fold")
        for check in checks:
            table.add_row(Text("ok", "green") if check.ok else Text("failed", "red"), check.name, check.result)
        TextConsole(width=None if sys.stdout.isatty() else 120, soft_wrap=False).print(table)
    return all(check.ok for check in checks)


def check_all(base_url: str, storage: str, tracking: str) -> Iterator[Check]:
    """Run the checks in order. The arguments are config fields; an empty one has its default, as in a run."""
    checks: dict[str, Callable[[], str]] = {
        "versions": _versions,
        "home": _home,
        "Tinker service": lambda: _service(base_url),
        "API key": lambda: _key(base_url),
        "Prefect": _prefect,
        "MLflow": lambda: _mlflow(tracking),
        "storage": lambda: _storage(storage),
    }
    for name, check in checks.items():
        try:
            yield Check(name, True, check())
        except TinkerFlowsError as error:
            yield Check(name, False, str(error))


def _versions() -> str:
    """Compare the installed packages with the version requirements of this package."""
    try:
        requirements = [Requirement(line) for line in requires(PACKAGE) or []]
    except PackageNotFoundError as error:
        raise ConfigError(f"The package {PACKAGE} is not installed: run `make install`.") from error
    problems = []
    for requirement in requirements:
        name = requirement.name
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            if not requirement.specifier.contains(version(name), prereleases=True):
                problems.append(f"{name} {version(name)} does not satisfy {requirement.specifier}")
        except PackageNotFoundError:
            problems.append(f"{name} is not installed")
    if problems:
        raise ConfigError(
            f"{'; '.join(problems)}: run `make install` or `pip install --constraint constraints.txt --editable .`."
        )
    names = ("prefect", "mlflow", "tinker", "tinker-cookbook", "torch")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return f"{PACKAGE} {version(PACKAGE)} on Python {sys.version.split()[0]}, {versions}"


def _home() -> str:
    free_gb = shutil.disk_usage(home()).free / 1e9
    if free_gb < MIN_FREE_GB:
        raise StorageError(
            f"The project home {home()} has {free_gb:.1f} GB free but checkpoints and logs need at least "
            f"{MIN_FREE_GB:.0f} GB: free disk space or set TINKER_FLOWS_HOME to another directory."
        )
    return f"{home()}, {free_gb:.0f} GB free"


def _service(base_url: str) -> str:
    service = service_at(base_url)
    if service is None:
        reason = "base_url is local" if base_url else "TINKER_BASE_URL and TINKER_API_KEY are not set"
        return f"local: each run starts its own engine ({reason})"
    name = f"The Tinker service at {service.resolved_url}"
    remedy = "set TINKER_BASE_URL or the config's base_url to a running service, or start one with `tinker-flows up`"
    check_reachable(name, f"{service.resolved_url}/api/v1/healthz", TIMEOUT_S, remedy)
    return service.resolved_url


def _key(base_url: str) -> str:
    service = service_at(base_url)
    if service is None:
        return "not needed: a local engine generates its own"
    models = TinkerService.model_copy(service, update={"connect_timeout_s": TIMEOUT_S}).models()
    names = ", ".join(models[:5])
    return f"accepted; the service trains {names}{f' and {len(models) - 5} more' if len(models) > 5 else ''}"


def _prefect() -> str:
    url = PREFECT_API_URL.value()
    if not url and (server := running_prefect_server()):
        with temporary_settings({PREFECT_API_URL: server.url, PREFECT_API_AUTH_STRING: server.login}):
            return f"{_prefect()} (of the running `tinker-flows up`)"
    if not url:
        _check_database(home() / "prefect.db")
        return f"local: each run starts its own server on {home() / 'prefect.db'} (PREFECT_API_URL is not set)"
    remedy = "set PREFECT_API_URL to a running server, unset it, or start a server with `tinker-flows up`"
    check_prefect_url()
    check_reachable(f"The Prefect server at {url}", f"{url}/health", TIMEOUT_S, remedy)
    with prefect_failures(remedy), get_client(sync_client=True) as client:
        server_version = client.api_version()
        settings = client.request("GET", "/admin/settings").json()
    batch_size = settings.get("server", {}).get("services", {}).get("task_run_recorder", {}).get("batch_size")
    warning = (
        f". It records task runs in batches of {batch_size} and may lose task runs of a busy run: start it with "
        f"{RECORDER}_BATCH_SIZE=100, {RECORDER}_READ_BATCH_SIZE=100 and {RECORDER}_FLUSH_INTERVAL=1"
    )
    return f"{url}, version {server_version}{warning if isinstance(batch_size, int) and batch_size < 100 else ''}"


def _check_database(path: Path) -> None:
    """Check that a SQLite database, if it exists, is intact and can be written to.

    Raises:
        StorageError: it is damaged or read-only.
    """
    if is_missing(path):
        return
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=TIMEOUT_S)) as connection:
            (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if result != "ok":
                raise sqlite3.DatabaseError(result)
            connection.execute("BEGIN IMMEDIATE")
    except sqlite3.Error as error:
        raise StorageError(
            f"The database {path} cannot be used ({error}): make it writable, replace it by a backup, or move it away."
        ) from error


def _mlflow(tracking: str) -> str:
    block = tracking_at(tracking, "tinker-flows")
    uri = block.resolved_uri
    if uri.startswith("sqlite:") and not Path(make_url(uri).database or "").exists():
        _check_writable(Path(make_url(uri).database or "").parent)
        return f"{uri} (the first run creates it)"
    block.get_client()
    return block.shown_uri


def _storage(storage: str) -> str:
    directory = storage_at(storage).run_directory(f"doctor-{uuid.uuid4().hex[:8]}")
    location = directory.location.rpartition("/")[0]
    if isinstance(directory, ObjectDirectory):
        if not directory.supports_conditional_writes():
            raise StorageError(
                f"The S3 server of {location} ignores If-None-Match and overwrites existing objects, so two writers of "
                "a run cannot detect each other: use a server with conditional writes, such as AWS S3."
            )
        return f"{location}, with conditional writes"
    _check_writable(Path(location))
    return location


def _check_writable(folder: Path) -> None:
    """Write and delete a file in a directory; remove directories created for the check, if they are empty.

    Raises:
        StorageError: the directory cannot be written to.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    probe = folder / f".doctor-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"probe")
    except OSError as error:
        raise StorageError(
            f"The directory {folder} is not writable ({reason(error)}): fix its permissions or disk, or choose another."
        ) from error
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
            for path in missing:
                path.rmdir()
