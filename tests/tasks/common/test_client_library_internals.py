"""Internals of MLflow, Prefect and the Tinker SDK that the project uses exist in the installed versions."""

from __future__ import annotations

import ast
import asyncio
import inspect
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from prefect.events.worker import EventsWorker
from prefect.states import Failed

from tasks.common.prefect_internals import WORKER_ATTRIBUTES, state_error

ROOT = Path(__file__).parents[3]
PACKAGES = ("blocks", "tasks", "flows", "deployments")
PREFECT_ADAPTER = "tasks/common/prefect_internals.py"
ADAPTERS = {"mlflow": "blocks/mlflow_internals.py", "tinker": "blocks/tinker_internals.py"}


def imported_names(adapter: str) -> list[tuple[str, str]]:
    """Module and name of each import in an adapter module."""
    imports = [node for node in ast.parse((ROOT / adapter).read_text()).body if isinstance(node, ast.ImportFrom)]
    return [(str(node.module), alias.name) for node in imports for alias in node.names]


def missing_internal(library: str, module: str, name: str) -> str | None:
    """Describe an internal that the installed version lacks, or return None."""
    try:
        if hasattr(import_module(module), name):
            return None
    except ImportError:
        pass
    return f"{library} {version(library)} has no {module}.{name}: update {ADAPTERS[library]}."


INTERNALS = [(library, *names) for library, adapter in ADAPTERS.items() for names in imported_names(adapter)]


@pytest.mark.parametrize(("library", "module", "name"), INTERNALS)
def test_internal_exists(library: str, module: str, name: str) -> None:
    if message := missing_internal(library, module, name):
        pytest.fail(message)


@pytest.mark.parametrize("module", ["mlflow.store.db.db_types", "mlflow.no_such_module"])
def test_missing_internal_names_library_and_version(module: str) -> None:
    expected = f"mlflow {version('mlflow')} has no {module}.NoSuchName: update blocks/mlflow_internals.py."
    assert missing_internal("mlflow", module, "NoSuchName") == expected


@pytest.mark.parametrize(("library", "module", "name"), INTERNALS)
def test_only_the_adapter_module_imports_the_internal(library: str, module: str, name: str) -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    users = {path.relative_to(ROOT).as_posix() for path in paths if f"from {module} import" in path.read_text()}
    assert users == {ADAPTERS[library]}


@pytest.mark.parametrize("name", WORKER_ATTRIBUTES)
def test_prefect_events_worker_has_the_attribute(name: str) -> None:
    sources = "".join(inspect.getsource(kind) for kind in EventsWorker.__mro__ if kind.__module__.startswith("prefect"))
    if f"self.{name}" not in sources or not hasattr(EventsWorker, "_instances"):
        pytest.fail(
            f"prefect {version('prefect')} has no EventsWorker.{name}: update tasks/common/prefect_internals.py."
        )


def test_prefect_state_returns_its_error_on_a_running_loop() -> None:
    error = ValueError("no")

    async def read() -> object:
        return state_error(Failed(data=error))

    if asyncio.run(read()) is not error:
        pytest.fail(f"prefect {version('prefect')} ignores _sync: update {PREFECT_ADAPTER}.")
