"""The docs site builds without a broken link and contains every page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.process
def test_site_has_every_page_and_no_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    home = (tmp_path / "index.html").read_text()
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    for page in pages:
        assert (tmp_path / page.with_suffix(".html")).exists()
        assert f'href="{page.with_suffix(".html").as_posix()}"' in home, f"{page} is not in the navigation"
    assert "tests/flows/test_sft.py" in (tmp_path / "reliability.html").read_text()
