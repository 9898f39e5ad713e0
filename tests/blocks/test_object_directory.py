"""A run's directory on S3, against a real S3 server that checks keys and conditions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from s3_server import ACCESS_KEY, SECRET_KEY, S3Server, running_s3

from blocks import RunStorage, object_directory
from blocks.errors import StorageError
from blocks.storage import RunDirectory


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


def storage_on(server: S3Server, key: str | None = ACCESS_KEY, secret: str | None = SECRET_KEY) -> RunStorage:
    return RunStorage(
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


def test_a_server_that_is_gone_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(object_directory.PATIENCE, "retries", {"mode": "standard", "max_attempts": 2})
    with running_s3(tmp_path) as server:
        directory = storage_on(server).run_directory("run")
        directory.write_bytes("file", b"kept")
        server.process.kill()
        server.process.wait()
        with pytest.raises(StorageError, match=r"Could not read .*Could not connect to the endpoint"):
            directory.append_line("file", "")


@pytest.mark.parametrize("url", ["gs://bucket/prefix", "s3://", "file:///tmp/runs"])
def test_other_kinds_of_storage_are_refused(url: str) -> None:
    with pytest.raises(StorageError, match="neither a local directory nor s3://bucket/prefix"):
        RunStorage(url=url).run_directory("run")


def test_the_default_is_in_the_home(home: Path) -> None:
    assert RunStorage().run_directory("run").location == str(home / "runs" / "run")
