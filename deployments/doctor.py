"""What a run would meet here: one check for each thing it needs, each with what to do where it is not well."""

from __future__ import annotations

import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import httpx
from packaging.requirements import Requirement
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_API_URL
from rich.console import Console
from rich.table import Table
from sqlalchemy import make_url

from blocks.errors import ConfigError, ServiceError, StorageError, TinkerFlowsError, reason
from blocks.home import home
from blocks.object_directory import ObjectDirectory
from blocks.reach import check_answers
from blocks.service import TinkerService
from flows.blocks_of import service_at, storage_at, tracking_at

PACKAGE = "tinker-flows"
PATIENCE_S = 20.0
LEAST_ROOM_GB = 2.0
RECORDER = "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a run needs, whether a run could start with it, and what was found, or is wrong and to be done."""

    name: str
    ok: bool
    found: str


def show_checks(base_url: str, storage: str, tracking: str, as_json: bool) -> bool:
    """Print every check; returns whether all are well."""
    checks = list(check_all(base_url, storage, tracking))
    if as_json:
        print(json.dumps([asdict(each) for each in checks], indent=2))
    else:
        table = Table(title="tinker-flows doctor", title_justify="left")
        for column in ("", "what", "found"):
            table.add_column(column, overflow="fold")
        for each in checks:
            table.add_row("[green]ok[/green]" if each.ok else "[red]no[/red]", each.name, each.found)
        Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(table)
    return all(each.ok for each in checks)


def check_all(base_url: str, storage: str, tracking: str) -> Iterator[Check]:
    """Check one thing after the other; the arguments are what a config says, empty for what the environment says."""
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
    """Every package that this one asks for, in a version that it asks for."""
    try:
        asked = [Requirement(each) for each in requires(PACKAGE) or []]
    except PackageNotFoundError as error:
        raise ConfigError(f"The package {PACKAGE} is not installed: call `make install`.") from error
    wrong = []
    for each in asked:
        if each.marker and not each.marker.evaluate({"extra": ""}):
            continue
        try:
            if not each.specifier.contains(version(each.name), prereleases=True):
                wrong.append(f"{each.name} is {version(each.name)} and has to be {each.specifier}")
        except PackageNotFoundError:
            wrong.append(f"{each.name} is not installed")
    if wrong:
        raise ConfigError(
            f"{'; '.join(wrong)}: call `make install`, or `pip install --constraint constraints.txt --editable .`."
        )
    shown = ", ".join(f"{name} {version(name)}" for name in ("prefect", "mlflow", "tinker", "tinker-cookbook", "torch"))
    return f"{PACKAGE} {version(PACKAGE)} on Python {sys.version.split()[0]}, {shown}"


def _home() -> str:
    free_gb = shutil.disk_usage(home()).free / 1e9
    if free_gb < LEAST_ROOM_GB:
        raise StorageError(
            f"The project's home {home()} has {free_gb:.1f} GB left, and checkpoints and logs need at least "
            f"{LEAST_ROOM_GB:.0f} GB: make room, or set TINKER_FLOWS_HOME to another directory."
        )
    return f"{home()}, {free_gb:.0f} GB free"


def _service(base_url: str) -> str:
    service = service_at(base_url)
    if service is None:
        return "a local engine, which each run starts for itself (TINKER_BASE_URL and TINKER_API_KEY are not set)"
    name = f"The Tinker service at {service.resolved_url}"
    remedy = "set TINKER_BASE_URL, or base_url in the config, to one that runs, or start one with `tinker-flows up`"
    check_answers(name, f"{service.resolved_url}/api/v1/healthz", PATIENCE_S, remedy)
    return service.resolved_url


def _key(base_url: str) -> str:
    service = service_at(base_url)
    if service is None:
        return "none is needed: the engine of a run has its own"
    models = TinkerService.model_copy(service, update={"connect_timeout_s": PATIENCE_S}).models()
    shown = ", ".join(models[:5])
    return f"accepted; the service trains {shown}{f' and {len(models) - 5} more' if len(models) > 5 else ''}"


def _prefect() -> str:
    url = PREFECT_API_URL.value()
    if not url:
        return f"a server of each run's own, on {home() / 'prefect.db'} (PREFECT_API_URL is not set)"
    remedy = "set PREFECT_API_URL to one that runs, unset it, or start one with `tinker-flows up`"
    check_answers(f"The Prefect server at {url}", f"{url}/health", PATIENCE_S, remedy)
    try:
        with get_client(sync_client=True) as client:
            server = client.api_version()
            settings = client.request("GET", "/admin/settings").json()
    except (httpx.HTTPError, PrefectException, RuntimeError, ValueError) as error:
        raise ServiceError(f"The Prefect server at {url} could not be used ({reason(error)}): {remedy}.") from error
    batch = settings.get("server", {}).get("services", {}).get("task_run_recorder", {}).get("batch_size")
    slow = f". It writes {batch} task run at a time and may lose some of a busy run: start it with {RECORDER}=100"
    return f"{url}, version {server}{slow if isinstance(batch, int) and batch < 100 else ''}"


def _mlflow(tracking: str) -> str:
    found = tracking_at(tracking, "tinker-flows")
    uri = found.resolved_uri
    if uri.startswith("sqlite:") and not Path(make_url(uri).database or "").exists():
        _probe(Path(make_url(uri).database or "").parent)
        return f"{uri}, which the first run makes"
    found.get_client()
    return uri


def _storage(storage: str) -> str:
    directory = storage_at(storage).run_directory(f"doctor-{uuid.uuid4().hex[:8]}")
    where = directory.location.rpartition("/")[0]
    if isinstance(directory, ObjectDirectory):
        if not directory.writes_conditionally():
            raise StorageError(
                f"The S3 server of {where} overwrites an object that it was told to leave (If-None-Match), so that two "
                "writers of a run would not see each other: take one that honours conditional writes, as AWS does."
            )
        return f"{where}, with conditional writes"
    _probe(Path(where))
    return where


def _probe(folder: Path) -> None:
    """Write a file below a directory, and leave everything as it was.

    Raises:
        StorageError: it cannot be written.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    probe = folder / f".doctor-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"probe")
        probe.unlink()
        for each in missing:
            each.rmdir()
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written to ({reason(error)}): mend its permissions or its disk, or name another place."
        ) from error
