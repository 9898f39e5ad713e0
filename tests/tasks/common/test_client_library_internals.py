"""Internals of MLflow, Prefect and the Tinker SDK that the project uses exist in the installed versions."""

from __future__ import annotations

import asyncio
import inspect
from importlib.metadata import version
from typing import Any

import pytest
import tinker
from library_internals import ROOT, imported_names, importers, missing_internal
from prefect.context import SettingsContext, serialize_context
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Failed

from blocks.tinker_internals import SAMPLING_METHOD
from tasks.common.internals.prefect import WORKER_ATTRIBUTES, settings_serialized_once, state_error

PACKAGES = ("blocks", "tasks", "flows", "deployments")
PREFECT_ADAPTER = "tasks/common/internals/prefect.py"
ADAPTERS = {
    "chz": "tasks/common/internals/chz.py",
    "mlflow": "blocks/mlflow_internals.py",
    "tinker": "blocks/tinker_internals.py",
    "tinker-cookbook": "tasks/common/internals/cookbook.py",
}


def is_internal(library: str, module: str, name: str) -> bool:
    """The cookbook marks its internals with an underscore; of the other libraries, adapters import internals alone."""
    if library == "tinker-cookbook":
        return module.startswith("tinker_cookbook.") and ("._" in module or name.startswith("_"))
    return module.startswith(f"{library}.")


INTERNALS = [
    (library, *names)
    for library, adapter in ADAPTERS.items()
    for names in imported_names(adapter)
    if is_internal(library, *names)
]


@pytest.mark.parametrize(("library", "module", "name"), INTERNALS)
def test_internal_exists(library: str, module: str, name: str) -> None:
    if message := missing_internal(library, ADAPTERS[library], module, name):
        pytest.fail(message)


@pytest.mark.parametrize("module", ["mlflow.store.db.db_types", "mlflow.no_such_module"])
def test_missing_internal_names_library_and_version(module: str) -> None:
    expected = f"mlflow {version('mlflow')} has no {module}.NoSuchName: update blocks/mlflow_internals.py."
    assert missing_internal("mlflow", ADAPTERS["mlflow"], module, "NoSuchName") == expected


@pytest.mark.parametrize(("library", "module", "name"), INTERNALS)
def test_only_the_adapter_module_imports_the_internal(library: str, module: str, name: str) -> None:
    # A public module may be imported anywhere, but not its internals.
    adapters = importers(module, *PACKAGES)
    if library == "tinker-cookbook":
        adapters = {path for path in adapters if name in (ROOT / path).read_text()}
    assert adapters == {ADAPTERS[library]}


@pytest.mark.parametrize("name", WORKER_ATTRIBUTES)
def test_prefect_events_worker_has_the_attribute(name: str) -> None:
    sources = "".join(inspect.getsource(kind) for kind in EventsWorker.__mro__ if kind.__module__.startswith("prefect"))
    if f"self.{name}" not in sources or not hasattr(EventsWorker, "_instances"):
        pytest.fail(
            f"prefect {version('prefect')} has no EventsWorker.{name}: update tasks/common/internals/prefect.py."
        )


def test_settings_are_serialized_once_for_all_submitted_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = serialize_context()["settings_context"]
    calls: list[object] = []
    original = SettingsContext.serialize

    def serialize(self: SettingsContext, include_secrets: bool = True) -> dict[str, Any]:
        calls.append(self)
        return original(self, include_secrets)

    monkeypatch.setattr(SettingsContext, "serialize", serialize)
    with settings_serialized_once():
        submitted = [serialize_context()["settings_context"] for _ in range(3)]
        with temporary_settings({PREFECT_API_URL: "http://elsewhere/api"}):
            changed = serialize_context()["settings_context"]
    assert submitted == [expected] * 3
    assert changed["settings"]["api"]["url"] == "http://elsewhere/api"
    assert len(calls) == 2


def test_sampling_client_has_the_method() -> None:
    """`tests/flows/test_costs.py` shows that its requests pass through it."""
    if not inspect.iscoroutinefunction(getattr(tinker.SamplingClient, SAMPLING_METHOD, None)):
        pytest.fail(f"tinker {version('tinker')} has no {SAMPLING_METHOD}: update {ADAPTERS['tinker']}.")


def test_prefect_state_returns_its_error_on_a_running_loop() -> None:
    error = ValueError("no")

    async def read() -> object:
        return state_error(Failed(data=error))

    if asyncio.run(read()) is not error:
        pytest.fail(f"prefect {version('prefect')} ignores _sync: update {PREFECT_ADAPTER}.")
