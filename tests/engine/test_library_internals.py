"""Library internals that the engine uses still exist in the installed versions."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

ENGINE = Path(__file__).parents[2] / "engine"
ADAPTERS = {"torch": "torch_internals.py", "transformers": "transformers_internals.py"}


def imported_names(adapter: str) -> list[tuple[str, str]]:
    """Module and name of each import in an adapter module."""
    tree = ast.parse((ENGINE / adapter).read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return [(str(node.module), alias.name) for node in imports for alias in node.names]


def missing_internal(library: str, module: str, name: str) -> str | None:
    """Describe an internal that the installed version lacks, or return None."""
    try:
        if hasattr(import_module(module), name):
            return None
    except ImportError:
        pass
    return f"{library} {version(library)} has no {module}.{name}: update engine/{ADAPTERS[library]}."


INTERNALS = [(library, *names) for library, adapter in ADAPTERS.items() for names in imported_names(adapter)]


@pytest.mark.parametrize(("library", "module", "name"), INTERNALS)
def test_internal_exists(library: str, module: str, name: str) -> None:
    if message := missing_internal(library, module, name):
        pytest.fail(message)


@pytest.mark.parametrize("module", ["torch.utils._python_dispatch", "torch.no_such_module"])
def test_missing_internal_names_library_and_version(module: str) -> None:
    expected = f"torch {version('torch')} has no {module}.NoSuchName: update engine/torch_internals.py."
    assert missing_internal("torch", module, "NoSuchName") == expected


@pytest.mark.parametrize(("library", "module", "name"), INTERNALS)
def test_only_the_adapter_module_imports_the_internal(library: str, module: str, name: str) -> None:
    users = {path.name for path in ENGINE.rglob("*.py") if f"from {module} import" in path.read_text()}
    assert users == {ADAPTERS[library]}
