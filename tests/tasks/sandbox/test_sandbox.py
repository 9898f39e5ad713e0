"""Sandbox of model-written code, with real processes and namespaces."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from blocks.errors import ConfigError
from tasks.sandbox import runner as sandbox
from tasks.sandbox.runner import Limits, run_program

pytestmark = pytest.mark.process

FORKS = "import os, time\nfor _ in range(50):\n    if os.fork() == 0:\n        time.sleep(60)\n"


def test_program_can_import_packages_and_write_files() -> None:
    program = (
        "import numpy, pathlib\npathlib.Path('note').write_text('é')\nprint(numpy.arange(4).sum(), open('note').read())"
    )
    outcome = run_program(program)
    assert (outcome.exit_code, outcome.output, outcome.timed_out) == (0, "6 é\n", False)
    assert run_program("raise SystemExit(3)").exit_code == 3
    # A program cannot imitate a refusal.
    assert run_program(f"import os; os._exit({sandbox.REFUSED})").exit_code == 1


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("open('/etc/passwd')", "No such file"),
        (f"open({str(Path(__file__))!r})", "No such file"),
        ("open('/usr/mine', 'w')", "Read-only file system"),
        ("open('/mine', 'w')", "Read-only file system"),
        ("open('big', 'wb').write(bytes(20_000_000))", "File too large"),
        ("for i in range(9): open(f'big{i}', 'wb').write(bytes(15_000_000))", "No space left"),
        ("import socket; socket.create_connection(('127.0.0.1', 22), 2)", "unreachable"),
        ("bytes(1_000_000_000)", "MemoryError"),
        (FORKS, "Resource temporarily unavailable"),
        ("files = [open(f'{i}', 'w') for i in range(99)]", "Too many open files"),
        pytest.param(f"import os; os.kill({os.getpid()}, 0)", "No such process", id="this process"),
        ("import os; os.setuid(0)", "Operation not permitted"),
    ],
)
def test_program_cannot_leave_the_sandbox_or_exceed_its_limits(program: str, error: str) -> None:
    outcome = run_program(program, Limits(memory_mb=100) if "range(9)" in program else Limits())
    assert outcome.exit_code == 1
    assert error in outcome.output


def test_time_is_limited_and_children_end_with_the_program() -> None:
    mark = f"mark{os.getpid()}"
    program = f"import os, time\nif os.fork() == 0:\n    os.setsid()\nprint('{mark}', flush=True)\ntime.sleep(10_000)"
    for seconds in (3.0, 30.0, 300.0):  # a busy machine may not start the program within the first limit
        outcome = run_program(program, Limits(seconds=seconds))
        assert outcome.timed_out
        if outcome.output == f"{mark}\n{mark}\n":
            break
    assert outcome.output == f"{mark}\n{mark}\n"
    parent = run_program(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(10_000)", Limits(seconds=300.0)
    )
    assert parent.exit_code == 0
    programs = running_programs()  # of this test, which would not end by themselves, and of other tests, which do
    wait_for(lambda: not programs & running_programs(), "the end of the programs", limit_s=250)


def running_programs() -> set[str]:
    """Return the PIDs of all programs in a sandbox."""
    listing = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listing.splitlines() if line.endswith(f"{sys.executable} -I -")}


def test_program_does_not_inherit_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    assert "tml" not in run_program("import os; print(dict(os.environ))").output
    allowed = run_program("import os; print(os.environ, os.path.exists('/etc'))", Limits(network="allow"))
    assert "tml" not in allowed.output
    assert allowed.output.rstrip().endswith("True")


def test_output_is_truncated_and_temporary_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert len(run_program("print('x' * 1_000_000)").output) == sandbox.OUTPUT_BYTES
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("part", "broken", "cause"),
    [
        ('_call("unshare", ', '_call("unshare", 1 | ', r"the kernel refuses namespaces \(unshare: Invalid argument\)"),
        (
            '"tmpfs", NO_SUID | NO_DEV, "size=1m',
            '"none", NO_SUID | NO_DEV, "size=1m',
            r"a file system of its own is refused \(mount: .*\): allow mounts",
        ),
        ("libseccomp.so.2", "libmissing.so.2", r"the library libmissing.so.2 is missing: install libseccomp"),
        ("rules) != 0", "rules) == 0", "the kernel refuses filters of system calls: allow seccomp"),
        (
            "resource.setrlimit(kind",
            "raise ValueError(kind",
            r"the limit \d+ is above that of this user \(.*\): lower `limits`",
        ),
    ],
)
def test_program_is_not_run_if_it_cannot_be_isolated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, broken: str, cause: str
) -> None:
    """Most containers refuse namespaces; invalid arguments simulate that."""
    child = tmp_path / "child.py"
    text = Path(sandbox.__file__).with_name("child.py").read_text()
    child.write_text(text.replace(part, broken))
    monkeypatch.setattr(sandbox, "_CHILD", child)
    mark = tmp_path / "mark"
    with pytest.raises(ConfigError, match=f"because {cause}.*; or set network: allow"):
        run_program(f"open({str(mark)!r}, 'w')")
    if "limit" not in cause:
        run_program(f"open({str(mark)!r}, 'w')", Limits(network="allow"))
        assert mark.exists()
    else:
        with pytest.raises(ConfigError, match=rf"cannot be run on this machine, because {cause}\.$"):
            run_program(f"open({str(mark)!r}, 'w')", Limits(network="allow"))
    # The config of a deployment's run must not set network: allow.
    monkeypatch.setattr(sandbox, "is_restricted", lambda: True)
    with pytest.raises(ConfigError, match=f"because {cause}") as refusal:
        run_program("", Limits())
    assert "allow to run" not in str(refusal.value)


@pytest.mark.parametrize(
    ("limit", "value", "allowed"),
    [
        *(("seconds", value, "a number from 0.1 to 86400") for value in (-1, 0, math.inf, math.nan, 1e9, "10", True)),
        *(("memory_mb", value, "an integer from 32 to 1048576") for value in (-1, 0, 8, 10**15, 10**30, 64.0)),
        *(("file_mb", value, "an integer from 1 to 1048576") for value in (-1, 0, 10**15)),
        *(("processes", value, "an integer from 1 to 32768") for value in (-1, 0, True, None)),
    ],
)
def test_limits_that_would_fail_every_program_are_refused(limit: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError, match=rf"^limits\.{limit} is {re.escape(str(value))}: set it to {allowed}\.$"):
        Limits(**{limit: value})


def test_programs_run_with_the_smallest_limits() -> None:
    outcome = run_program("import json, math, re; print(6 * 7)", Limits(memory_mb=32, file_mb=1, processes=1))
    assert (outcome.exit_code, outcome.output) == (0, "42\n")


def test_python_may_be_a_symbolic_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").symlink_to(Path(sys.executable).parent)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / Path(sys.executable).name))
    outcome = run_program("print(6 * 7)", Limits())
    assert (outcome.exit_code, outcome.output) == (0, "42\n")
