"""Fences of README and docs, and a fresh copy of the project in which their commands run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
# Beginning of a command that serves until it is stopped, and the text that it prints once it is ready.
SERVERS = {"tinker-flows up": "Ready in", "python -m engine": "http://"}
READY_LIMIT_S = 300.0

_FENCE = re.compile(
    r"^```(?P<language>\w+)\n(?P<code>.*?)^```\n(?:\s*\*Not run by the tests: (?P<reason>.*?)\*$)?", re.S | re.M
)


@dataclass(frozen=True, slots=True)
class Fence:
    """Code block of a page.

    Attributes:
        page: path of the page in the project.
        line: its first line.
        language: language after the backticks.
        code: its content.
        reason: the text of a line "Not run by the tests: ..." below it; empty if the tests run it.
    """

    page: str
    line: int
    language: str
    code: str
    reason: str

    @property
    def name(self) -> str:
        """Page and line, as the id of a test."""
        return f"{self.page}:{self.line}"


def fences(*languages: str) -> list[Fence]:
    """Return the fences of some languages on all pages."""
    return [
        Fence(
            str(page.relative_to(ROOT)),
            text[: match.start()].count("\n") + 1,
            match["language"],
            match["code"],
            " ".join((match["reason"] or "").split()),
        )
        for page in PAGES
        for text in (page.read_text(),)
        for match in _FENCE.finditer(text)
        if match["language"] in languages
    ]


def copy_project(target: Path) -> Path:
    """Copy the files of the project, without what runs have left; link the virtual environment."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, file)
    (target / ".venv").symlink_to(sys.prefix)
    return target


def environment(project: Path, **changes: str) -> Mapping[str, str]:
    """Return the environment of a user's shell in a copy of the project, with the virtual environment active."""
    own = ("TINKER_", "PREFECT_", "MLFLOW_", "PYTEST_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    # PYTHONPATH: the commands run the copy, wherever the installed package points.
    path = {"PYTHONPATH": str(project), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return inherited | path | changes


def run_commands(project: Path, code: Sequence[str], limit_s: float) -> None:
    """Run fences in one shell, as written; stop the servers that they started.

    Raises:
        AssertionError: a command failed; the message has the end of the output.
    """
    lines = [line for fence in code for line in fence.splitlines()]
    script = project / "commands.sh"
    script.write_text("\n".join(["set -euo pipefail", *map(_in_background_if_server, lines), "exit 0\n"]))
    log = project / "commands.log"
    with log.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", script.name],
            cwd=project,
            env=environment(project),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = shell.wait(limit_s)
        finally:
            _stop_group(shell.pid)
    assert status == 0, log.read_text(errors="replace")[-6000:]


def _in_background_if_server(line: str) -> str:
    """Start a server in the background and wait until it is ready or has ended."""
    for number, (command, ready) in enumerate(SERVERS.items()):
        if line.startswith(command):
            log = f"server-{number}.log"
            until = f"until grep -q '{ready}' {log}; do kill -0 $0 || exit 1; sleep 0.2; done"
            wait = f'timeout {READY_LIMIT_S:.0f} bash -c "{until.replace("$", chr(92) + "$")}" $!'
            return f"{line.partition('#')[0].rstrip()} > {log} 2>&1 &\n{wait} || {{ cat {log}; exit 1; }}"
    return line


def _stop_group(group: int, grace_s: float = 60.0) -> None:
    """Interrupt the processes of a group, and kill those that do not end."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group, sent)
        except ProcessLookupError:
            return
        end = time.monotonic() + grace_s
        while time.monotonic() < end:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return
            time.sleep(0.2)
