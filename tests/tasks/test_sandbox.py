"""The sandbox: what a program can do in it, and what it cannot; real processes in real namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blocks.errors import ConfigError
from tasks import sandbox
from tasks.sandbox import Limits, run_program

FORKS = "import os, time\nfor _ in range(50):\n    if os.fork() == 0:\n        time.sleep(60)\n"


def test_a_program_runs_with_packages_and_a_place_to_write() -> None:
    program = (
        "import numpy, pathlib\npathlib.Path('note').write_text('é')\nprint(numpy.arange(4).sum(), open('note').read())"
    )
    outcome = run_program(program)
    assert (outcome.exit_code, outcome.output, outcome.timed_out) == (0, "6 é\n", False)
    assert run_program("raise SystemExit(3)").exit_code == 3
    # What says that nothing was run is never a program's own.
    assert run_program(f"import os; os._exit({sandbox.REFUSED})").exit_code == 1


@pytest.mark.parametrize(
    ("program", "said"),
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
def test_what_a_program_cannot_do(program: str, said: str) -> None:
    outcome = run_program(program, Limits(memory_mb=100) if "range(9)" in program else Limits())
    assert outcome.exit_code == 1
    assert said in outcome.output


def test_time_is_limited_and_whatever_was_started_ends_with_it() -> None:
    mark = f"mark{os.getpid()}"
    program = f"import os, time\nif os.fork() == 0:\n    os.setsid()\nprint('{mark}', flush=True)\ntime.sleep(60)"
    outcome = run_program(program, Limits(seconds=3.0))
    assert outcome.timed_out
    assert outcome.output == f"{mark}\n{mark}\n"
    left = run_program("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)")
    assert left.exit_code == 0
    deadline = time.monotonic() + 30  # other tests may have programs of their own, for a moment
    while f"{sys.executable} -I -" in running() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert f"{sys.executable} -I -" not in running()


def running() -> list[str]:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()


def test_nothing_of_the_environment_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    assert "tml" not in run_program("import os; print(dict(os.environ))").output
    allowed = run_program("import os; print(os.environ, os.path.exists('/etc'))", Limits(network="allow"))
    assert "tml" not in allowed.output
    assert allowed.output.rstrip().endswith("True")


def test_output_is_read_as_far_as_the_limit_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert len(run_program("print('x' * 1_000_000)").output) == sandbox.OUTPUT_BYTES
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_that_refuses_is_told_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for namespaces, as in most containers: played by a child that refuses as the kernel does."""
    child = tmp_path / "child.py"
    text = Path(sandbox.__file__).with_name("sandbox_child.py").read_text()
    child.write_text(text.replace('_call("unshare", ', '_call("unshare", 1 | '))  # no such flag: the kernel says EINVAL
    monkeypatch.setattr(sandbox, "_CHILD", child)
    mark = tmp_path / "mark"
    with pytest.raises(ConfigError, match=r"kept apart here \(unshare: .*or set network: allow"):
        run_program(f"open({str(mark)!r}, 'w')")
    run_program(f"open({str(mark)!r}, 'w')", Limits(network="allow"))
    assert mark.exists()


def test_python_may_be_reached_by_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").symlink_to(Path(sys.executable).parent)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / Path(sys.executable).name))
    outcome = run_program("print(6 * 7)", Limits())
    assert (outcome.exit_code, outcome.output) == (0, "42\n")
