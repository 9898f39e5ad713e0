"""Every Python fence in README and docs runs, as a reader would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCES = [
    pytest.param(code, id=f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for text in (path.read_text(),)
    for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)
    for code in (match[1],)
]


@pytest.mark.parametrize("code", FENCES)
def test_fence_runs(code: str, tmp_path: Path, prefect_server: str) -> None:
    environment = {**os.environ, "TINKER_FLOWS_HOME": str(tmp_path), "PREFECT_API_URL": prefect_server}
    environment.pop("TINKER_API_KEY", None)
    script = tmp_path / "fence.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere() -> None:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}, which is not there"


def test_the_tests_that_are_named_are_there() -> None:
    for path in (ROOT / "docs").rglob("*.md"):
        for name, target in re.findall(r"\[(test_\w+)\]\(([^)]+)\)", path.read_text()):
            assert f"def {name}(" in (path.parent / target).read_text(), f"{path.name} names {name}"
