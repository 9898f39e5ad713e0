"""Internals of libraries that adapter modules of this project import."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]


def imported_names(adapter: str) -> list[tuple[str, str]]:
    """Module and name of each import in an adapter module."""
    imports = [node for node in ast.parse((ROOT / adapter).read_text()).body if isinstance(node, ast.ImportFrom)]
    return [(str(node.module), alias.name) for node in imports for alias in node.names]


def missing_internal(library: str, adapter: str, module: str, name: str) -> str | None:
    """Describe an internal that the installed version lacks, or return None."""
    try:
        if hasattr(import_module(module), name):
            return None
    except ImportError:
        pass
    return f"{library} {version(library)} has no {module}.{name}: update {adapter}."


def importers(module: str, *packages: str) -> set[str]:
    """Paths of the modules of packages that import from a module."""
    paths = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix() for path in paths if f"from {module} import" in path.read_text()}
