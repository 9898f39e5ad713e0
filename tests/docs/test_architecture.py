"""The tree of docs/architecture.md is the real one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("objectives", "engine", "blocks", "tasks", "flows", "deployments", "tinker_flows")


def documented_folders() -> list[str]:
    tree = re.search(r"```\n(objectives/.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)
    assert tree
    folders: list[str] = []
    parents: list[str] = []
    for line in tree[1].splitlines():
        indented, name = re.fullmatch(r"( *)(\w+)/.*", line).groups()  # pyright: ignore[reportOptionalMemberAccess]
        parents[len(indented) // 2 :] = [name]
        folders.append("/".join(parents))
    return folders


def test_the_tree_shows_every_folder():
    found = {
        str(path.parent.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.parent.name != "__pycache__"
    }
    assert sorted(documented_folders()) == sorted(found)


def test_every_folder_has_a_docstring():
    for folder in documented_folders():
        text = (ROOT / folder / "__init__.py").read_text()
        assert text.startswith('"""'), folder
