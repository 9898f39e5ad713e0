"""Python programs that fork from a process that has imported the project, which takes a program five seconds.

They are for tests of what a program does. Tests of its start and its exit run it with `subprocess`.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from prefect.context import root_settings_context

ROOT = Path(__file__).parents[1]
# One fork server serves all programs of a pytest process, and the trials of its sweeps.
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.forked_imports"])


@dataclass(frozen=True, slots=True)
class ForkedProgram:
    """Running program, with the methods of `subprocess.Popen` that the tests use."""

    process: ForkServerProcess
    log: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        """Return the exit status, or None while the program runs."""
        return self.process.exitcode

    def wait(self, timeout_s: float) -> int:
        """Wait until the program has ended and return its exit status."""
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.process.name), timeout_s)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the program with kill -9; without effect if it has ended."""
        self.process.kill()

    def output(self) -> str:
        """Standard output and standard error so far."""
        return self.log.read_text()


def start_program(
    command: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path = ROOT, *, new_session: bool = False
) -> ForkedProgram:
    """Start `python COMMAND`, where the command is `-m MODULE ARGUMENTS` or `SCRIPT ARGUMENTS`."""
    sys.audit("subprocess.Popen", command[0], command, cwd, env)  # `--no-processes` forbids it
    log.touch()
    process = _CONTEXT.Process(target=_run, args=(list(command), dict(env), log, cwd, new_session), name=command[-1])
    process.start()
    return ForkedProgram(process, log)


def _run(command: list[str], env: Mapping[str, str], log: Path, cwd: Path, new_session: bool) -> None:
    if new_session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    assert "torch" in sys.modules, f"the tests must run in {ROOT}, from which the fork server imports the project"
    with root_settings_context():  # Prefect read its settings from the environment of the fork server
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
