"""Every Python fence in README and docs runs as a script, and every link and test name exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

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
    # PYTHONPATH: the fences run against this checkout, wherever the installed package points.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TINKER_FLOWS_HOME": str(tmp_path)}
    environment["PREFECT_API_URL"] = prefect_server
    environment.pop("TINKER_API_KEY", None)
    script = tmp_path / "fence.py"
    script.write_text(code)
    result = subprocess.run(
        [sys.executable, script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert result.returncode == 0, result.stderr


def test_relative_links_exist() -> None:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}, which does not exist"


def test_named_tests_exist() -> None:
    for path in (ROOT / "docs").rglob("*.md"):
        for name, target in re.findall(r"\[(test_\w+)\]\(([^)]+)\)", path.read_text()):
            assert f"def {name}(" in (path.parent / target).read_text(), (
                f"{path.name} names the test {name}, which {target} does not define"
            )
