"""Errors of import paths that a config names."""

from __future__ import annotations

import sys

import pytest

from blocks.errors import ConfigError
from tasks.common.builders import import_object

ARENA = "tinker_cookbook.recipes.multiplayer_rl.text_arena.env"


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)  # import of textarena fails as if it were not installed
    monkeypatch.delitem(sys.modules, ARENA, raising=False)
    with pytest.raises(ConfigError, match=r"not installed .*install it with pip install 'tinker-flows\[arena\]'\.$"):
        import_object(f"{ARENA}:TwoPlayerTextArenaDatasetBuilder", "environment.builder")
    with pytest.raises(ConfigError, match="give an import path such as"):
        import_object("no_such_module:Name", "environment.builder")
