"""Library internals that the engine uses still exist in the installed versions."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from library_internals import imported_names, importers, missing_internal

ADAPTERS = {"torch": "engine/torch_internals.py", "transformers": "engine/transformers_internals.py"}
INTERNALS = [(library, *names) for library, adapter in ADAPTERS.items() for names in imported_names(adapter)]


@pytest.mark.parametrize(("library", "module", "name"), INTERNALS)
def test_internal_exists(library: str, module: str, name: str) -> None:
    if message := missing_internal(library, ADAPTERS[library], module, name):
        pytest.fail(message)


@pytest.mark.parametrize("module", ["torch.utils._python_dispatch", "torch.no_such_module"])
def test_missing_internal_names_library_and_version(module: str) -> None:
    expected = f"torch {version('torch')} has no {module}.NoSuchName: update engine/torch_internals.py."
    assert missing_internal("torch", ADAPTERS["torch"], module, "NoSuchName") == expected


@pytest.mark.parametrize(("library", "module", "name"), INTERNALS)
def test_only_the_adapter_module_imports_the_internal(library: str, module: str, name: str) -> None:
    assert importers(module, "engine") == {ADAPTERS[library]}
