"""A run's directory on S3, against a real S3 server that checks keys and conditions."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from chaos.proxy import Proxies, Proxy
from chaos.schedule import ACTIONS, Fault
from pydantic import SecretStr
from s3_server import ACCESS_KEY, SECRET_KEY, S3Server, running_s3

from blocks import RunStorage, lease, objects
from blocks.errors import StorageError
from blocks.object_directory import ObjectDirectory
from blocks.processes import free_port
from blocks.storage import RunDirectory

# Forked, because a fresh interpreter takes seconds for its imports.
fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def no_credentials_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a test does not give comes from nowhere else."""
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_PROFILE",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def storage_on(
    server: S3Server, key: str | None = ACCESS_KEY, secret: str | None = SECRET_KEY, patience_s: float = 60
) -> RunStorage:
    return RunStorage(
        patience_s=patience_s,
        url=f"s3://{server.bucket}/below/",
        endpoint_url=server.endpoint_url,
        access_key=SecretStr(key) if key else None,
        secret_key=SecretStr(secret) if secret else None,
    )


@pytest.fixture
def directory(s3: S3Server, request: pytest.FixtureRequest) -> Iterator[RunDirectory]:
    with storage_on(s3).run_directory(request.node.name) as directory:
        yield directory


def test_a_file_comes_back_as_it_was_written(s3: S3Server, directory: RunDirectory) -> None:
    assert directory.location.startswith(f"s3://{s3.bucket}/below/test_")
    assert directory.read_bytes("config.json") is None
    directory.write_bytes("config.json", b"one")
    directory.write_bytes("config.json", b"two")
    assert directory.read_bytes("config.json") == b"two"


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(each, marks=() if each in ("cut answer", "drop answer", "garbage") else pytest.mark.slow)
        for each in ACTIONS
    ],
)
def test_a_request_that_fails_on_its_way(s3: S3Server, action: str) -> None:
    """Every request of a read, a write and an append, in turn; the record stays what it was, and grows once."""
    proxy = Proxy(free_port(), int(s3.endpoint_url.rpartition(":")[2]))
    behind = replace(s3, endpoint_url=f"http://127.0.0.1:{proxy.port}")
    directory = storage_on(behind).run_directory(f"way-{action.replace(' ', '-')}")
    lines = ["first"]
    with Proxies({"s3": proxy}):
        directory.append_line("record", "first")
        for skip in range(3):
            proxy.arm(Fault(0, 0.0, "s3", action, skip, 0.1))
            lines.append(f"after {skip}")
            directory.append_line("record", lines[-1])
        proxy.arm(Fault(0, 0.0, "s3", action, 0, 0.1))
        assert (directory.read_bytes("record") or b"").decode().splitlines() == lines
    assert storage_on(s3).run_directory(directory.location.rpartition("/")[2]).read_bytes("record")


def test_a_reader_sees_the_old_object_or_the_new(s3: S3Server, directory: RunDirectory) -> None:
    contents = [letter * 500_000 for letter in (b"a", b"b")]
    directory.write_bytes("object", contents[0])
    done = threading.Event()

    def write() -> None:
        own = storage_on(s3).run_directory(directory.location.rpartition("/")[2])
        for number in range(1, 20):
            own.write_bytes("object", contents[number % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert directory.read_bytes("object") in contents
    writer.join()


def test_lines_are_appended_behind_what_is_there(directory: RunDirectory) -> None:
    for number in range(5):
        directory.append_line("lines", f"line {number}")
    assert directory.read_bytes("lines") == b"".join(b"line %d\n" % number for number in range(5))


def test_a_torn_tail_is_closed(directory: RunDirectory) -> None:
    directory.write_bytes("lines", b"first\nsec")
    directory.append_line("lines", "third")
    assert directory.read_bytes("lines") == b"first\nsec\nthird\n"


def test_two_writers_lose_no_acknowledged_line_and_one_is_refused(s3: S3Server, directory: RunDirectory) -> None:
    name = directory.location.rpartition("/")[2]
    acknowledged: list[str] = []
    refusals: list[str] = []

    def write(writer: int) -> None:
        own = storage_on(s3).run_directory(name)
        number = 0
        while not refusals:
            line = f"{writer} {number}"
            try:
                own.append_line("lines", line)
            except StorageError as error:
                refusals.append(str(error))
            else:
                acknowledged.append(line)
            number += 1

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(2)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    lines = (directory.read_bytes("lines") or b"").decode().splitlines()
    assert sorted(lines) == sorted(acknowledged)
    assert refusals[0] == (
        f"The run in {directory.location} is being written by another process: "
        "wait for it, stop it, or choose another run_name."
    )


@pytest.mark.parametrize(("key", "secret"), [("unknown", "x"), (ACCESS_KEY, "wrong")])
def test_wrong_keys_are_refused_in_one_sentence(s3: S3Server, key: str, secret: str) -> None:
    directory = storage_on(s3, key, secret).run_directory("run")
    for use in (
        lambda: directory.read_bytes("file"),
        lambda: directory.write_bytes("file", b""),
        lambda: directory.append_line("file", ""),
    ):
        with pytest.raises(StorageError, match=r"Could not \w+ s3://.*run/file \(.*\): mend that storage .*keys\)"):
            use()


def test_half_a_pair_of_keys_and_none_at_all_are_refused(s3: S3Server) -> None:
    with pytest.raises(StorageError, match="Partial credentials found"):
        storage_on(s3, secret=None).run_directory("run").read_bytes("file")
    with pytest.raises(StorageError, match="Unable to locate credentials"):
        storage_on(s3, key=None, secret=None).run_directory("run").read_bytes("file")


def test_an_endpoint_or_bucket_that_cannot_be_is_named(s3: S3Server) -> None:
    keys = {"access_key": SecretStr("x"), "secret_key": SecretStr("x")}
    with pytest.raises(StorageError, match="Invalid endpoint: nonsense"):
        RunStorage(url="s3://runs/a", endpoint_url="nonsense", **keys).run_directory("run").read_bytes("file")
    with pytest.raises(StorageError, match='Invalid bucket name "no bucket"'):
        RunStorage(url="s3://no bucket/a", endpoint_url=s3.endpoint_url, **keys).run_directory("run").read_bytes("f")


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(objects.CLIENT, "retries", {"mode": "standard", "max_attempts": 2})
    monkeypatch.setattr(objects, "LONGEST_PAUSE_S", 0.3)


@pytest.mark.usefixtures("short_pauses")
def test_a_server_that_is_gone_is_given_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with running_s3(tmp_path) as server:
        directory = storage_on(server, patience_s=1).run_directory("run")
        directory.write_bytes("file", b"kept")
        server.kill()
        with pytest.raises(StorageError, match=r"Could not read .*Could not connect to the endpoint"):
            directory.append_line("file", "")
    assert "it is tried again for up to 1 s." in capfd.readouterr().err


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("num_kills", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_no_acknowledged_line_is_lost_or_doubled_by_a_server_that_is_killed_and_started_again(
    tmp_path: Path, num_kills: int
) -> None:
    """The writer waits; it never sees an error."""
    with running_s3(tmp_path) as server, storage_on(server).run_directory("run") as directory:
        acknowledged: list[str] = []
        stop = threading.Event()

        def write() -> None:
            while not stop.is_set():
                directory.append_line("lines", f"line {len(acknowledged)}")
                acknowledged.append(f"line {len(acknowledged)}")

        with ThreadPoolExecutor(max_workers=1) as pool:
            writing = pool.submit(write)
            for _ in range(num_kills):
                before = len(acknowledged)
                while len(acknowledged) < before + 10 and not writing.done():
                    stop.wait(0.01)
                server.kill()
                stop.wait(1.5)  # longer than botocore itself would try
                server.restart()
            stop.set()
            writing.result()
        directory.append_line("lines", "last")
        assert (directory.read_bytes("lines") or b"").decode().splitlines() == [*acknowledged, "last"]


def test_a_second_writer_is_refused_by_the_name_of_the_first(
    s3: S3Server, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 1.0)
    second = storage_on(s3).run_directory("twice")
    with storage_on(s3).run_directory("twice") as first:
        with pytest.raises(StorageError, match=rf"being written by process {os.getpid()} on .*, since 20.* UTC: wait"):
            second.__enter__()
        first.append_line("lines", "not disturbed")
    with second:
        assert second.read_bytes("lines") == b"not disturbed\n"
        second.append_line("lines", "free when the first is done")


def test_of_many_writers_at_once_one_is_let_in(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 2.0)
    start = threading.Barrier(4)

    def enter(_: int) -> RunDirectory | None:
        own = storage_on(s3).run_directory("many")
        start.wait()
        try:
            return own.__enter__()
        except StorageError:
            return None

    with ThreadPoolExecutor(max_workers=4) as pool:
        (winner,) = [each for each in pool.map(enter, range(4)) if each]
    winner.append_line("lines", "one")
    winner.__exit__(None, None, None)


def hold(server: S3Server, pipe: Connection) -> None:
    """Hold a run's directory in a process of its own, and write to it when told to."""
    try:
        with storage_on(server).run_directory("held") as directory:
            directory.append_line("lines", "held")
            pipe.send("held")
            pipe.recv()
            directory.append_line("lines", "too late")
            pipe.send("written")
    except StorageError as error:
        pipe.send(str(error))


@contextmanager
def holding(server: S3Server) -> Iterator[tuple[BaseProcess, Connection]]:
    ours, theirs = fork.Pipe()
    child = fork.Process(target=hold, args=(server, theirs), daemon=True)
    child.start()
    try:
        assert ours.recv() == "held"
        yield child, ours
    finally:
        child.kill()
        child.join()
        ours.close()
        theirs.close()


def test_the_lease_of_a_killed_process_is_free_at_once(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 10_000.0)
    with holding(s3) as (child, _):
        child.kill()
        child.join()
        with storage_on(s3).run_directory("held") as directory:
            assert (directory.read_bytes("lines") or b"").endswith(b"held\n")


def test_the_lease_of_a_frozen_process_lapses_and_it_writes_no_more(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 1.0)
    with holding(s3) as (child, pipe):
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        with storage_on(s3).run_directory("held") as directory:
            directory.append_line("lines", "taken over")
            os.kill(child.pid, signal.SIGCONT)
            pipe.send("write")
            assert f"being written by process {os.getpid()}" in pipe.recv()
            assert (directory.read_bytes("lines") or b"").endswith(b"held\ntaken over\n")


def test_a_missing_bucket_is_no_empty_run(s3: S3Server) -> None:
    storage = storage_on(s3)
    elsewhere = storage.model_copy(update={"url": "s3://missing-bucket/below"})
    with pytest.raises(StorageError, match="bucket does not exist"):
        elsewhere.run_directory("run").read_bytes("checkpoints.jsonl")


@pytest.mark.parametrize("url", ["gs://bucket/prefix", "s3://", "file:///tmp/runs"])
def test_other_kinds_of_storage_are_refused(url: str) -> None:
    with pytest.raises(StorageError, match="neither a local directory nor s3://bucket/prefix"):
        RunStorage(url=url).run_directory("run")


def test_the_default_is_in_the_home(home: Path) -> None:
    assert RunStorage().run_directory("run").location == str(home / "runs" / "run")


def test_who_holds_a_run_is_told_and_the_runs_are_listed(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = replace_url(storage_on(s3), f"s3://{s3.bucket}/listed")
    assert storage.run_names() == []
    looking = storage.run_directory("held")
    with storage.run_directory("held") as directory:
        directory.write_bytes("config.json", b"{}")
        assert looking.holder().startswith(f"process {os.getpid()} on ")
        monkeypatch.setattr(lease, "LEASE_S", -1.0)  # older than that is every lease
        assert looking.holder() == ""
        monkeypatch.undo()
    assert looking.holder() == ""
    storage.run_directory("no-run").write_bytes("sweep.json", b"{}")
    assert storage.run_names() == ["held"]


def test_a_server_that_writes_under_conditions_is_known(s3: S3Server) -> None:
    directory = storage_on(s3).run_directory("conditions")
    assert isinstance(directory, ObjectDirectory)
    assert directory.writes_conditionally()
    assert directory.read_bytes(".probe") is None


def replace_url(storage: RunStorage, url: str) -> RunStorage:
    return RunStorage.model_validate({**dict(storage), "url": url})
