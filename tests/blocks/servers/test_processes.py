"""Local services of a run: start, clean stop, and stop after a kill of the run."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
from waiting import wait_for

from blocks.errors import ServiceError, StorageError
from blocks.servers import supervise
from blocks.servers.processes import (
    RunningPrefectServer,
    local_engine,
    local_prefect_server,
    running_prefect_server,
    start_error,
    supervised_command,
)

pytestmark = pytest.mark.process

# A run that starts both services and still uses them after Ctrl-C.
RUN = """
import signal, urllib.request
from blocks.servers.processes import local_engine, local_prefect_server

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
def test_services_survive_ctrl_c_but_end_with_a_killed_run(tmp_path: Path) -> None:
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

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)  # the imports of the engine take ten times as long
    try:
        with pytest.raises(KeyboardInterrupt), local_engine(model="tiny", dtype="float32", threads=1):
            pass
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert not [child for child in psutil.Process().children() if f"{home}/engine" in child.cmdline()]


def test_a_supervised_command_stops_with_its_descendants() -> None:
    """Closing standard input has the same effect as killing the parent process."""
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


def test_a_command_ends_with_its_killed_supervisor() -> None:
    command = supervised_command([sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as supervisor:
        assert supervisor.stderr is not None
        assert supervisor.stderr.readline() == b"up\n"
        started = psutil.Process(supervisor.pid).children()
        supervisor.kill()
        assert alive_after(started) == []


def test_a_command_that_ignores_a_signal_to_its_supervisor_is_killed() -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    command = supervised_command([sys.executable, "-c", stubborn], grace_s=0.2)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as supervisor:
        assert supervisor.stderr is not None
        assert supervisor.stderr.readline() == b"up\n"
        supervisor.terminate()
        assert supervisor.wait(60) == -signal.SIGKILL % 256


def test_a_killed_command_is_started_again() -> None:
    tree = "import signal, subprocess as s; s.Popen(['sleep', '600']); print('up', flush=True); signal.pause()"
    command = supervised_command([sys.executable, "-c", tree], num_restarts=1)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stderr is not None
        assert supervisor.stderr.readline() == "up\n"
        (child,) = psutil.Process(supervisor.pid).children()
        first = [child, *child.children()]
        child.kill()
        assert supervisor.stderr.readline() == f"{sys.executable!r} was killed by signal 9 and is started again.\n"
        assert alive_after(first) == []
        assert supervisor.stderr.readline() == "up\n"
        (child,) = psutil.Process(supervisor.pid).children()
        child.kill()
        assert supervisor.wait() == -signal.SIGKILL % 256


def test_a_killed_prefect_server_is_started_again(home: Path) -> None:
    before = psutil.Process().children()
    with local_prefect_server() as url:
        (supervisor,) = (child for child in psutil.Process().children() if child not in before)
        (server,) = supervisor.children()
        server.kill()
        assert alive_after([server]) == []

        def responds() -> bool:
            with suppress(OSError), urlopen(f"{url}/health", timeout=5):
                return True
            return False

        wait_for(responds, "the response of the second server")
        assert supervisor.children() != [server]


def test_an_engine_start_error_names_cause_and_log(home: Path) -> None:
    with (
        pytest.raises(ServiceError, match=r"^The local engine did not start: .*invalid choice: 'int3'") as caught,
        local_engine(model="tiny", dtype="int3", threads=None),
    ):
        pass
    (log,) = (home / "logs").iterdir()
    assert str(caught.value).endswith(f"(log: {log})")
    assert "int3" in log.read_text()


def test_a_prefect_start_error_names_cause_and_log(home: Path) -> None:
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


def test_a_prefect_database_of_another_version_is_named_with_the_fix(home: Path) -> None:
    with local_prefect_server():
        pass
    with closing(sqlite3.connect(home / "prefect.db")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
        connection.commit()
    with (
        pytest.raises(
            ServiceError, match=rf"Can't locate revision .*\): a newer version has written {home}/prefect.db: upgrade"
        ),
        local_prefect_server(),
    ):
        pass


@pytest.mark.parametrize(
    ("log_text", "fix"),
    [
        ("", "and its log {log} is empty: check the free space of that disk."),
        (
            "sqlite3.DatabaseError: file is not a database\n",
            "(log: {log}): {home}/prefect.db is damaged: replace it by a backup, or move it away.",
        ),
    ],
)
def test_a_start_error_says_what_to_do(home: Path, tmp_path: Path, log_text: str, fix: str) -> None:
    log = tmp_path / "prefect.log"
    log.write_text(log_text)
    assert str(start_error("Prefect server", log)).endswith(fix.format(log=log, home=home))


def test_the_prefect_server_of_up_is_found(home: Path, prefect_server: str) -> None:
    home.mkdir(exist_ok=True)
    stack = home / "up.json"
    assert running_prefect_server() is None
    with stack.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as `up` does while it runs
        stack.write_text('{"pid": 1, "endpoints": [], "exports": {}}')  # `up` is starting
        assert running_prefect_server() is None
        login = {"PREFECT_API_AUTH_STRING": "me:secret", "MLFLOW_TRACKING_URI": "http://127.0.0.1:5000"}
        stack.write_text(json.dumps({"exports": {"PREFECT_API_URL": "http://127.0.0.1:1/api", **login}}))
        assert running_prefect_server() is None
        stack.write_text(json.dumps({"exports": {"PREFECT_API_URL": prefect_server, **login}}))
        assert running_prefect_server() == RunningPrefectServer(prefect_server, "me:secret", "http://127.0.0.1:5000")
    assert running_prefect_server() is None  # of an `up` that has ended


def test_an_unusable_home_is_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "file" / "home"))
    with (
        pytest.raises(
            StorageError, match=r"home .*file/home cannot be created \(Not a directory\): set TINKER_FLOWS_HOME"
        ),
        local_prefect_server(),
    ):
        pass


# A service with two orphans: one in its process group, and one in a new session that ignores SIGTERM.
ORPHANING_SERVICE = """
import subprocess, sys
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(1000)"
left = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
left.stdout.readline()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print("left", flush=True)
"""


@pytest.mark.parametrize("remainder", ["", "import time; time.sleep(1000)"], ids=["ended", "stopped"])
def test_orphaned_processes_end_with_their_service(remainder: str) -> None:
    command = supervised_command([sys.executable, "-c", ORPHANING_SERVICE + remainder], grace_s=1)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdin is not None
        assert supervisor.stderr is not None
        assert supervisor.stderr.readline() == "left\n"
        started = psutil.Process(supervisor.pid).children(recursive=True)
        assert len(started) >= 2
        supervisor.stdin.close()
        assert alive_after(started) == []
