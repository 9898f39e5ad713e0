"""The option tables of the docs are those of the config models."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.options import find_pages, update_page


@pytest.mark.parametrize("page", find_pages(), ids=lambda path: path.name)
def test_page_shows_the_current_options(page: Path) -> None:
    text = page.read_text()
    assert update_page(text) == text, f"{page.name} is stale: run python -m docs.options"
