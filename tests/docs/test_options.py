"""The option tables of the docs are those of the config models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.options import DOCS, find_pages, update_page
from flows.runs.start.config_record import MAY_CHANGE


@pytest.mark.parametrize("page", find_pages(), ids=lambda path: path.name)
def test_page_shows_the_current_options(page: Path) -> None:
    text = page.read_text()
    assert update_page(text) == text, f"{page.name} is stale: run python -m docs.options"


def test_config_page_lists_the_fields_that_may_change() -> None:
    text = (DOCS / "config.md").read_text()
    paragraph = re.search(r"A finished or stopped run can continue with new values.*?\n\n", text, re.DOTALL)
    assert paragraph
    assert set(re.findall(r"`(\w+)`", paragraph[0])) == MAY_CHANGE
