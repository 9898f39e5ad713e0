"""Services that a run starts for itself: up, stopped in good order, and gone however the run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from blocks import supervise
from blocks.errors import ServiceError, StorageError
from blocks.processes import local_engine, local_prefect_server, supervised

# A run: it starts both services, and after a Ctrl-C still needs them.
RUN = """
import signal, urllib.request
from blocks.processes import local_engine, local_prefect_server

with local_prefect_server() as prefect, local_engine(model="tiny", dtype="float32", threads=1) as engine:
    try:
        print("up", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        for url in f"{prefect}/health", f"{engine.base_url}/api/v1/healthz":
            urllib.request.urlopen(url, timeout=10).close()
        print("still up", flush=True)
        signal.pause()
"""


def alive_after(processes: Sequence[psutil.Process], limit_s: float = 60) -> list[str]:
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    return [" ".join(process.cmdline()) for process in alive]


@pytest.mark.slow
def test_services_outlive_a_ctrl_c_and_not_the_kill_of_their_run(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RUN],
        env={**os.environ, "TINKER_FLOWS_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        assert run.stdout is not None
        try:
            assert run.stdout.readline() == "up\n"
            started = psutil.Process(run.pid).children(recursive=True)
            assert any("engine" in process.cmdline() for process in started)
            assert any("server" in process.cmdline() for process in started)
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does, to the whole group
            assert run.stdout.readline() == "still up\n"
        finally:
            run.kill()
        run.wait()
        assert alive_after(started) == []


def test_a_ctrl_c_while_an_engine_loads_stops_it(home: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)  # its imports alone take ten times as long
    try:
        with pytest.raises(KeyboardInterrupt), local_engine(model="tiny", dtype="float32", threads=1):
            pass
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not [child for child in psutil.Process().children() if f"{home}/engine" in child.cmdline()]


def test_a_supervised_command_is_stopped_with_all_it_started() -> None:
    """The end of standard input is what a killed starter leaves behind."""
    tree = "import signal, subprocess as s; s.Popen(['sleep', '600']); print('up', flush=True); signal.pause()"
    with subprocess.Popen(
        [sys.executable, supervise.__file__, sys.executable, "-c", tree],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        assert process.stderr.readline() == b"up\n"
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) == 2
        process.stdin.close()
        process.wait()
        assert alive_after(started) == []


def test_an_engine_that_cannot_start_says_why_and_where_its_log_is(home: Path) -> None:
    with (
        pytest.raises(ServiceError, match=r"^The local engine did not start: .*invalid choice: 'int3'") as caught,
        local_engine(model="tiny", dtype="int3", threads=None),
    ):
        pass
    (log,) = (home / "logs").iterdir()
    assert str(caught.value).endswith(f"(log: {log})")
    assert "int3" in log.read_text()


def test_a_prefect_server_that_cannot_start_says_why_and_where_its_log_is(home: Path) -> None:
    (home / "prefect.db").mkdir(parents=True)
    with (
        pytest.raises(
            ServiceError, match=r"^The local Prefect server did not start: .*unable to open database"
        ) as caught,
        local_prefect_server(),
    ):
        pass
    (log,) = (home / "logs").iterdir()
    assert str(caught.value).endswith(f"(log: {log})")


def test_a_home_that_cannot_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "file" / "home"))
    with (
        pytest.raises(
            StorageError, match=r"home .*file/home cannot be made \(Not a directory\): set TINKER_FLOWS_HOME"
        ),
        local_prefect_server(),
    ):
        pass


# A service that leaves two processes behind: one in its group, and one in a session of its own that hears no SIGTERM.
LEAVER = """
import subprocess, sys
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(1000)"
left = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
left.stdout.readline()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print("left", flush=True)
"""


@pytest.mark.parametrize("stays", ["", "import time; time.sleep(1000)"], ids=["ended", "stopped"])
def test_what_a_service_leaves_behind_ends_with_it(stays: str) -> None:
    command = supervised([sys.executable, "-c", LEAVER + stays], grace_s=1)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdin is not None
        assert supervisor.stderr is not None
        assert supervisor.stderr.readline() == "left\n"
        started = psutil.Process(supervisor.pid).children(recursive=True)
        assert len(started) >= 2
        supervisor.stdin.close()
        assert alive_after(started) == []
