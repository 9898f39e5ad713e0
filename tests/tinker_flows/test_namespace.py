"""The public namespace is complete, lazy, documented and typed."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tinker_flows
import tinker_flows.losses

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "prefect", "mlflow", "transformers", "tinker", "tinker_cookbook", "pydantic", "objectives.term")
INTERNAL = {"objectives", "engine", "blocks", "tasks", "flows", "deployments"}
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def typed_names() -> dict[str, str]:
    """Names of the `if TYPE_CHECKING` block, each with its module."""
    tree = ast.parse(Path(tinker_flows.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(block.body)
    return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}


@pytest.mark.parametrize("name", tinker_flows.__all__)
def test_name_is_the_documented_object_of_its_module(name: str) -> None:
    value = getattr(tinker_flows, name)
    assert value is getattr(importlib.import_module(tinker_flows._MODULES[name]), name)
    assert (value.__doc__ or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize("name", tinker_flows.losses.__all__)
def test_loss_is_documented(name: str) -> None:
    assert (getattr(tinker_flows.losses, name).__doc__ or "").strip()


def test_the_lists_of_names_agree() -> None:
    assert typed_names() == tinker_flows._MODULES
    assert sorted(tinker_flows.__all__) == sorted(tinker_flows._MODULES)
    assert {*tinker_flows.__all__, "losses", "__version__"} == set(dir(tinker_flows))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tinker_flows.nonsense


@pytest.mark.process
def test_import_loads_nothing_heavy() -> None:
    code = f"import sys, tinker_flows; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tinker_flows.__version__ == project["version"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docs_import_the_public_namespace_only(page: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            internal = [module for module in modules if module.partition(".")[0] in INTERNAL]
            assert not internal, f"{page.name} imports {', '.join(internal)}: import it from tinker_flows"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docs_name_public_objects_that_exist(page: Path) -> None:
    names = re.findall(r"tinker_flows[:.](\w+)", page.read_text())
    metric_tags = {"warning", "restart", "guard", "stopped", "passes", "parent", "not_promoted", "rlhf", "regularizers"}
    metric_tags |= {"approval", "correction", "estimator", "evaluation", "opening", "prices", "promotion", "skipped"}
    metric_tags |= {"target"}
    unknown = sorted({*names} - {*dir(tinker_flows)} - metric_tags)
    assert not unknown, f"{page.name} names {', '.join(unknown)}, which tinker_flows does not export"
