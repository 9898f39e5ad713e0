"""Library internals that the objectives use still exist, and only one module uses them."""

from __future__ import annotations

import ast
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from objectives.torch_internals import count_changes

OBJECTIVES = Path(__file__).parents[2] / "objectives"
ADAPTER = "torch_internals.py"
OWNERS = {"self", "cls", "os"}  # `os._exit` is documented.


def private_attributes(path: Path) -> set[str]:
    """Private attributes that a module reads from objects other than its own."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in OWNERS)
    }


def private_imports(path: Path) -> set[str]:
    """Imports of private modules or names."""
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in imports for alias in node.names if node.module != "__future__"}
    return {name for name in names if "._" in name}


@pytest.mark.parametrize("name", sorted(private_attributes(OBJECTIVES / ADAPTER)))
def test_internal_exists(name: str) -> None:
    if not hasattr(torch.zeros(1), name):
        pytest.fail(f"torch {version('torch')} has no Tensor.{name}: update objectives/{ADAPTER}.")


def test_changes_are_counted_through_views() -> None:
    tensor = torch.zeros(3)
    assert count_changes(tensor) == 0
    tensor[1:].add_(1.0)
    tensor.mul_(2.0)
    assert count_changes(tensor) == 2


def test_only_the_adapter_module_uses_internals() -> None:
    modules = [path for path in OBJECTIVES.rglob("*.py") if path.name != ADAPTER]
    assert {path.name: names for path in modules if (names := private_attributes(path) | private_imports(path))} == {}
