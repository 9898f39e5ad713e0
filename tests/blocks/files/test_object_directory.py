"""Run directory on S3, against a real S3 server that checks keys and conditional writes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import fsspec
import pytest
from chaos.proxy import Proxies, Proxy
from chaos.schedule import ACTIONS, Fault
from closed_folder import close_folder
from pydantic import SecretStr
from s3_server import ACCESS_KEY, SECRET_KEY, S3Server, running_s3
from waiting import wait_for

from blocks import RunStorage
from blocks.errors import LostRunError, StorageError
from blocks.files import lease, objects
from blocks.files.local_directory import LocalDirectory
from blocks.files.lock_holder import LockHolder
from blocks.files.object_directory import ObjectDirectory
from blocks.servers.processes import free_port
from blocks.storage import RunDirectory
from tasks.training.tracking.metrics_file import METRICS_NAME, MetricsFile

# Fork, because the imports of a new interpreter take seconds.
fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def no_ambient_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide credentials of the environment."""
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


def test_files_round_trip(s3: S3Server, directory: RunDirectory) -> None:
    assert directory.location.startswith(f"s3://{s3.bucket}/below/test_")
    assert directory.read_bytes("config.json") is None
    directory.write_bytes("config.json", b"one")
    directory.write_bytes("config.json", b"two")
    assert directory.read_bytes("config.json") == b"two"


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(action, marks=() if action in ("cut response", "drop response", "garbage") else pytest.mark.slow)
        for action in ACTIONS
    ],
)
def test_failed_requests_change_the_record_once_or_not_at_all(s3: S3Server, action: str) -> None:
    """Fail each request of a read, a write and an append in turn; each append takes effect exactly once."""
    proxy = Proxy(free_port(), int(s3.endpoint_url.rpartition(":")[2]))
    proxied = replace(s3, endpoint_url=f"http://127.0.0.1:{proxy.port}")
    directory = storage_on(proxied).run_directory(f"proxied-{action.replace(' ', '-')}")
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


def test_metrics_have_one_line_per_step_after_a_resume(directory: RunDirectory) -> None:
    """Several lines are one write of the object, and the lines of repeated steps are replaced."""
    first = MetricsFile(directory, 0)
    for step in range(4):
        first.log(step, {"loss": 1.0})
    first.flush()
    directory.write_bytes(METRICS_NAME, (directory.read_bytes(METRICS_NAME) or b"") + b'{"step": 4, "lo')
    again = MetricsFile(directory, 2)
    for step in range(2, 6):
        again.log(step, {"loss": 2.0})
    again.flush()
    lines = [json.loads(line) for line in (directory.read_bytes(METRICS_NAME) or b"").splitlines()]
    assert lines == [{"step": step, "loss": 1.0 if step < 2 else 2.0} for step in range(6)]


def test_removed_files_are_gone(s3: S3Server, directory: RunDirectory) -> None:
    for name in ("config.json", "lines"):
        directory.append_line(name, "one")
    assert directory.names() == ["config.json", "lines"]
    for name in directory.names():
        directory.remove(name)
    assert directory.names() == []
    assert directory.read_bytes("lines") is None
    assert directory.writer(), "the lease is kept"
    directory.append_line("lines", "two")
    assert directory.read_bytes("lines") == b"two\n"


def test_readers_see_whole_objects(s3: S3Server, directory: RunDirectory) -> None:
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


def test_lines_are_appended_in_order(directory: RunDirectory) -> None:
    for number in range(5):
        directory.append_line("lines", f"line {number}")
    assert directory.read_bytes("lines") == b"".join(b"line %d\n" % number for number in range(5))


def test_an_incomplete_last_line_is_terminated(directory: RunDirectory) -> None:
    directory.write_bytes("lines", b"first\nsec")
    directory.append_line("lines", "third")
    assert directory.read_bytes("lines") == b"first\nsec\nthird\n"


def test_two_writers_lose_no_acknowledged_line_and_one_is_rejected(s3: S3Server, directory: RunDirectory) -> None:
    name = directory.location.rpartition("/")[2]
    acknowledged: list[str] = []
    rejections: list[str] = []

    def write(writer: int) -> None:
        own = storage_on(s3).run_directory(name)
        number = 0
        while not rejections:
            line = f"{writer} {number}"
            try:
                own.append_line("lines", line)
            except StorageError as error:
                rejections.append(str(error))
            else:
                acknowledged.append(line)
            number += 1

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(2)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    lines = (directory.read_bytes("lines") or b"").decode().splitlines()
    assert sorted(lines) == sorted(acknowledged)
    assert rejections[0] == (
        f"The run in {directory.location} is being written by another process: "
        "wait for it, stop it, or choose another run_name."
    )


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="the system has no clock that runs during a suspend")
def test_writer_notices_after_a_suspend_of_its_machine_that_it_was_replaced(
    s3: S3Server, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.check_writer()
    filesystem = storage_on(s3)._objects("/" + directory.location.rpartition("/")[2])
    other = LockHolder("other", 1, "elsewhere", "", "2026-01-01", "", "")
    version = filesystem.version(lease.NAME)
    filesystem.write(lease.NAME, json.dumps({"holder": asdict(other), "renewal": 1}).encode(), version)
    directory.check_writer()  # within LEASE_S, nobody may replace it, so it does not ask the server
    clock = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda number: clock(number) + lease.LEASE_S + 1)
    with pytest.raises(LostRunError, match="is being written by process 1 on elsewhere"):
        directory.check_writer()


@pytest.mark.parametrize(("key", "secret"), [("unknown", "x"), (ACCESS_KEY, "wrong")])
def test_wrong_keys_are_rejected_with_one_sentence(s3: S3Server, key: str, secret: str) -> None:
    directory = storage_on(s3, key, secret).run_directory("run")
    for use in (
        lambda: directory.read_bytes("file"),
        lambda: directory.write_bytes("file", b""),
        lambda: directory.append_line("file", ""),
    ):
        with pytest.raises(StorageError, match=r"Could not \w+ s3://.*run/file \(.*\): fix that storage .*keys\)"):
            use()


def test_partial_or_missing_keys_are_rejected(s3: S3Server) -> None:
    with pytest.raises(StorageError, match=r"Partial credentials found.*: set AWS_ACCESS_KEY_ID and AWS_SEC"):
        storage_on(s3, secret=None).run_directory("run").read_bytes("file")
    with pytest.raises(StorageError, match=r"Unable to locate credentials\): set AWS_ACCESS_KEY_ID and AWS_SEC"):
        storage_on(s3, key=None, secret=None).run_directory("run").read_bytes("file")


def test_an_invalid_endpoint_or_bucket_is_named_in_the_error(s3: S3Server) -> None:
    keys = {"access_key": SecretStr("x"), "secret_key": SecretStr("x")}
    with pytest.raises(StorageError, match="Invalid endpoint: nonsense"):
        RunStorage(url="s3://runs/a", endpoint_url="nonsense", **keys).run_directory("run").read_bytes("file")
    with pytest.raises(StorageError, match='Invalid bucket name "no bucket"'):
        RunStorage(url="s3://no bucket/a", endpoint_url=s3.endpoint_url, **keys).run_directory("run").read_bytes("f")


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(objects.CLIENT, "retries", {"mode": "standard", "max_attempts": 2})
    monkeypatch.setattr(objects, "LONGEST_PAUSE_S", 0.3)


@pytest.mark.process
@pytest.mark.usefixtures("short_pauses")
def test_an_unreachable_server_is_an_error_after_the_patience(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with running_s3(tmp_path) as server:
        directory = storage_on(server, patience_s=1).run_directory("run")
        directory.write_bytes("file", b"kept")
        server.kill()
        with pytest.raises(
            StorageError, match=r"Could not read .*Could not connect to the endpoint.*: start its server, or"
        ):
            directory.append_line("file", "")
    assert "retrying for up to 1 s." in capfd.readouterr().err


@pytest.mark.process
@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("num_kills", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_server_restart_neither_loses_nor_duplicates_lines(tmp_path: Path, num_kills: int) -> None:
    """The writer waits and sees no error."""
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
                stop.wait(1.5)  # longer than botocore retries
                server.restart()
            stop.set()
            writing.result()
        directory.append_line("lines", "last")
        assert (directory.read_bytes("lines") or b"").decode().splitlines() == [*acknowledged, "last"]


def test_a_second_writer_is_rejected_with_the_name_of_the_first(
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


def test_one_of_many_concurrent_writers_gets_the_lease(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
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
        (winner,) = [directory for directory in pool.map(enter, range(4)) if directory]
    winner.append_line("lines", "one")
    winner.__exit__(None, None, None)


def hold(server: S3Server, pipe: Connection) -> None:
    """Hold a run directory in a separate process and write to it on request."""
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


def test_the_lease_of_a_killed_process_is_free_immediately(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 10_000.0)
    with holding(s3) as (child, _):
        child.kill()
        child.join()
        with storage_on(s3).run_directory("held") as directory:
            assert (directory.read_bytes("lines") or b"").endswith(b"held\n")


def test_a_frozen_process_loses_its_lease_and_cannot_write(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
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


def delete_prefix(server: S3Server, name: str) -> None:
    s3 = fsspec.filesystem(
        "s3", key=ACCESS_KEY, secret=SECRET_KEY, endpoint_url=server.endpoint_url, use_listings_cache=False
    )
    s3.rm(f"{server.bucket}/below/{name}", recursive=True)


@pytest.mark.parametrize("action", ["append", "write", "remove", "read"])
def test_writer_of_a_deleted_prefix_stops(s3: S3Server, action: str) -> None:
    name = f"deleted-{action}"
    with storage_on(s3).run_directory(name) as directory:
        directory.append_line("lines", "one")
        delete_prefix(s3, name)
        actions = {
            "append": lambda: directory.append_line("lines", "two"),
            "write": lambda: directory.write_bytes("config.json", b"two"),
            "remove": lambda: directory.remove("lines"),
            "read": lambda: directory.read_bytes("lines"),
        }
        removed = f"^The run directory {directory.location} was removed or replaced while this process was writing it: "
        with pytest.raises(LostRunError, match=removed):
            actions[action]()
        with pytest.raises(LostRunError, match=removed):
            directory.check_writer()
    assert storage_on(s3).run_directory(name).names() == []


def test_writer_of_a_deleted_prefix_leaves_the_next_writer_alone(s3: S3Server) -> None:
    with storage_on(s3).run_directory("rewritten") as directory:
        directory.append_line("lines", "one")
        delete_prefix(s3, "rewritten")
        with storage_on(s3).run_directory("rewritten") as again:
            again.append_line("lines", "of the next writer")
            with pytest.raises(LostRunError, match=f"is being written by process {os.getpid()}"):
                directory.append_line("lines", "two")
            assert again.read_bytes("lines") == b"of the next writer\n"


def test_renewal_notices_a_deleted_prefix(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 0.3)
    with storage_on(s3).run_directory("renewed") as directory:
        delete_prefix(s3, "renewed")

        def notices() -> bool:
            try:
                directory.check_writer()
            except LostRunError as error:
                return "was removed or replaced" in str(error)
            return False

        wait_for(notices, "the error of the renewal")
        assert directory.names() == []


def test_a_missing_bucket_is_an_error(s3: S3Server) -> None:
    storage = storage_on(s3)
    elsewhere = storage.model_copy(update={"url": "s3://missing-bucket/below"})
    with pytest.raises(StorageError, match=r"bucket does not exist\): create the bucket missing-bucket, or set"):
        elsewhere.run_directory("run").read_bytes("checkpoints.jsonl")


@pytest.mark.parametrize("url", ["gs://bucket/prefix", "s3://", "file:///tmp/runs"])
def test_other_url_schemes_are_rejected(url: str) -> None:
    with pytest.raises(StorageError, match="neither a local directory nor s3://bucket/prefix"):
        RunStorage(url=url).run_directory("run")


@pytest.mark.parametrize(
    ("path", "part"),
    [("team//x", "the path segment ''"), ("./x", "the path segment '.'"), ("a?versionId=3", "'\\?versionId='")],
)
def test_ambiguous_prefixes_are_rejected(path: str, part: str) -> None:
    with pytest.raises(StorageError, match=f"^The run storage url 's3://bucket/.*' has {part}: remove it\\.$"):
        RunStorage(url=f"s3://bucket/{path}").run_names()


def test_a_folder_of_another_user_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "no-run").mkdir()
    close_folder(monkeypatch, "closed", "is_file")
    assert RunStorage(url=str(tmp_path)).run_names() == ["closed"]


def test_a_file_as_storage_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for url in (str(tmp_path / "file"), "/dev/null"):
        with pytest.raises(StorageError, match=f"^The run storage '{url}' is not a directory: set it to one\\.$"):
            RunStorage(url=url).run_directory("run")


def test_default_storage_is_in_the_project_home(home: Path) -> None:
    assert RunStorage().run_directory("run").location == str(home / "runs" / "run")


def test_writer_and_run_names_are_reported(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = replace_url(storage_on(s3), f"s3://{s3.bucket}/listed")
    assert storage.run_names() == []
    reader = storage.run_directory("held")
    with storage.run_directory("held") as directory:
        directory.write_bytes("config.json", b"{}")
        assert reader.writer().startswith(f"process {os.getpid()} on ")
        monkeypatch.setattr(lease, "LEASE_S", -1.0)  # every lease counts as expired
        assert reader.writer() == ""
        monkeypatch.undo()
    assert reader.writer() == ""
    storage.run_directory("no-run").write_bytes("sweep.json", b"{}")
    assert storage.run_names() == ["held"]


def test_the_lock_of_a_copied_local_directory_is_free(s3: S3Server, tmp_path: Path) -> None:
    with LocalDirectory(tmp_path) as local:
        local.write_bytes("config.json", b"{}")
        lock = (tmp_path / ".lock").read_bytes()
    copied = storage_on(s3).run_directory("copied")
    copied.write_bytes(".lock", lock)
    assert copied.writer() == ""
    with copied:
        copied.write_bytes("config.json", b"{}")
        assert copied.writer().startswith("process ")


def test_conditional_writes_are_detected(s3: S3Server) -> None:
    directory = storage_on(s3).run_directory("conditions")
    assert isinstance(directory, ObjectDirectory)
    assert directory.supports_conditional_writes()
    assert directory.read_bytes(".probe") is None


def replace_url(storage: RunStorage, url: str) -> RunStorage:
    return RunStorage.model_validate({**dict(storage), "url": url})
