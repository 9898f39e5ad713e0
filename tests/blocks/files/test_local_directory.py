"""Local run directory: whole files, whole lines and one writer, despite killed processes and a full disk."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import pytest

from blocks import RunStorage
from blocks.errors import LostRunError, StorageError
from blocks.files import local_directory
from blocks.files.local_directory import LocalDirectory

# Fork, because the imports of a new interpreter take seconds.
fork = multiprocessing.get_context("fork")


def in_child(work: Callable[[Connection], None]) -> tuple[BaseProcess, Connection]:
    ours, theirs = fork.Pipe()
    child = fork.Process(target=work, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    return child, ours


def test_files_round_trip(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "runs" / "a")
    assert directory.read_bytes("config.json") is None
    assert not (tmp_path / "runs").exists()  # reading creates nothing
    directory.write_bytes("config.json", b"one")
    directory.write_bytes("config.json", b"two")
    assert directory.read_bytes("config.json") == b"two"
    assert [path.name for path in (tmp_path / "runs" / "a").iterdir()] == ["config.json"]


def test_removed_files_and_folders_are_gone(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "run")
    assert directory.names() == []
    with directory:
        directory.write_bytes("config.json", b"{}")
        directory.append_line("lines", "one")
        (tmp_path / "run" / "folder").mkdir()
        (tmp_path / "run" / "folder" / "file").write_text("text")
        (tmp_path / "run" / "link").symlink_to(tmp_path)
        assert directory.names() == ["config.json", "folder", "lines", "link"]
        for name in directory.names():
            directory.remove(name)
        assert directory.names() == []
        assert directory.read_bytes("config.json") is None
        assert tmp_path.exists()  # the target of the link
        with pytest.raises(StorageError, match="remove"):
            directory.remove("config.json")


@pytest.mark.process
def test_readers_see_whole_files_when_the_writer_is_killed(tmp_path: Path) -> None:
    contents = {bytes([letter]) * 300_000 for letter in b"ab"}

    def write_forever(pipe: Connection) -> None:
        directory = LocalDirectory(tmp_path)
        while True:
            for content in contents:
                directory.write_bytes("file", content)
                pipe.send("written")

    directory = LocalDirectory(tmp_path)
    for _ in range(5):
        child, pipe = in_child(write_forever)
        pipe.recv()
        assert {directory.read_bytes("file") for _ in range(30)} <= contents
        child.kill()
        child.join()
        pipe.close()
        assert directory.read_bytes("file") in contents
    with directory:  # the next holder removes the temporary files of the killed processes
        assert {path.name for path in tmp_path.iterdir()} == {".lock", "file"}


def test_lines_are_appended_in_order(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path)
    directory.append_line("lines", "one")
    directory.append_line("lines", "zwölf")
    assert directory.read_bytes("lines") == "one\nzwölf\n".encode()


@pytest.mark.parametrize("cut", range(len(b"first\nsecond\n") + 1))
def test_an_incomplete_last_line_does_not_damage_other_lines(tmp_path: Path, cut: int) -> None:
    (tmp_path / "lines").write_bytes(b"first\nsecond\n"[:cut])
    LocalDirectory(tmp_path).append_line("lines", "third")
    lines = (tmp_path / "lines").read_text().splitlines()
    assert lines[-1] == "third"
    assert lines[:-1] == b"first\nsecond\n"[:cut].decode().splitlines()


@pytest.mark.process
def test_a_full_disk_keeps_acknowledged_lines_and_no_partial_line(tmp_path: Path) -> None:
    def append_until_full(pipe: Connection) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        directory = LocalDirectory(tmp_path)
        for number in range(100):
            try:
                directory.append_line("lines", f"{number} {'x' * 900}")
            except StorageError as error:
                pipe.send((number, str(error)))
                return

    child, pipe = in_child(append_until_full)
    acknowledged, message = pipe.recv()
    child.join()
    pipe.close()
    assert message == (
        f"Could not append to {tmp_path / 'lines'} (File too large): fix that storage (free space, permissions or "
        "keys) and run the same command again; everything saved earlier is intact."
    )
    directory = LocalDirectory(tmp_path)
    directory.append_line("lines", "after")
    numbers = [line.split()[0] for line in (directory.read_bytes("lines") or b"").decode().splitlines()]
    assert numbers == [*map(str, range(acknowledged)), "after"]


@pytest.mark.process
def test_a_full_disk_keeps_the_old_file_and_no_temporary_file(tmp_path: Path) -> None:
    def write_too_much(pipe: Connection) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with pytest.raises(StorageError, match=r"Could not write .*config.json .*File too large"):
            LocalDirectory(tmp_path).write_bytes("config.json", b"x" * 30_000)
        pipe.send("rejected")

    LocalDirectory(tmp_path).write_bytes("config.json", b"old")
    child, pipe = in_child(write_too_much)
    assert pipe.recv() == "rejected"
    child.join()
    pipe.close()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"config.json": b"old"}


@pytest.mark.process
def test_a_second_process_is_rejected_until_the_first_ends(tmp_path: Path) -> None:
    def hold(pipe: Connection) -> None:
        with LocalDirectory(tmp_path):
            pipe.send("held")
            signal.pause()

    child, pipe = in_child(hold)
    assert pipe.recv() == "held"
    with (
        pytest.raises(StorageError, match=rf"being written by process {child.pid} on .*, since 20.* UTC: wait for it"),
        LocalDirectory(tmp_path),
    ):
        pass
    child.kill()
    child.join()
    pipe.close()
    with LocalDirectory(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / ".lock").read_text()


def test_a_second_run_in_the_same_process_is_rejected(tmp_path: Path) -> None:
    first, second = LocalDirectory(tmp_path), LocalDirectory(tmp_path)
    with first:
        with pytest.raises(StorageError, match=f"process {os.getpid()}"):
            second.__enter__()
        with pytest.raises(StorageError, match=f"process {os.getpid()}"):
            second.__enter__()
    with second:
        pass


def test_a_path_below_a_file_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"Could not create .*file/run \(Not a directory\)"):
        LocalDirectory(tmp_path / "file" / "run").write_bytes("config.json", b"")


@pytest.mark.parametrize(
    ("verb", "use"),
    [
        ("read", lambda directory: directory.read_bytes("taken")),
        ("write", lambda directory: directory.write_bytes("taken", b"")),
        ("append to", lambda directory: directory.append_line("taken", "")),
    ],
)
def test_an_unusable_file_is_named_in_the_error(
    tmp_path: Path, verb: str, use: Callable[[LocalDirectory], object]
) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(StorageError, match=rf"Could not {verb} .*taken \(Is a directory\)"):
        use(LocalDirectory(tmp_path))


@pytest.mark.parametrize("write", ["write_bytes", "append_line"])
def test_a_directory_that_is_removed_in_the_middle_of_a_write_is_named_as_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    open_private = local_directory.open_private

    def open_after_removal(path: Path, *arguments: Any, **options: Any) -> IO[Any]:
        shutil.rmtree(path.parent)
        return open_private(path, *arguments, **options)

    with LocalDirectory(tmp_path / "run") as directory:
        monkeypatch.setattr(local_directory, "open_private", open_after_removal)
        with pytest.raises(LostRunError, match="was removed or replaced while this process was writing it"):
            getattr(directory, write)("config.json", b"{}" if write == "write_bytes" else "{}")


def test_reading_the_writer_does_not_block_a_lock(tmp_path: Path) -> None:
    reader, directory = LocalDirectory(tmp_path / "a"), LocalDirectory(tmp_path / "a")
    assert reader.writer() == ""
    with directory:
        assert reader.writer().startswith(f"process {os.getpid()} on ")
    assert reader.writer() == ""
    stop = threading.Event()

    def read_writer() -> None:
        while not stop.is_set():
            reader.writer()

    thread = threading.Thread(target=read_writer)
    thread.start()
    try:
        for _ in range(200):  # `writer` never blocks the lock
            with directory:
                pass
    finally:
        stop.set()
        thread.join()


def test_run_names_lists_runs(tmp_path: Path) -> None:
    storage = RunStorage(url=str(tmp_path / "runs"))
    assert storage.run_names() == []
    for name in ("b", "a"):
        storage.run_directory(name).write_bytes("config.json", b"{}")
    storage.run_directory("no-run").write_bytes("sweep.json", b"{}")
    (tmp_path / "runs" / "file").touch()
    assert storage.run_names() == ["a", "b"]
    with pytest.raises(StorageError, match="is not a directory: set it to one"):
        RunStorage(url=str(tmp_path / "runs" / "file")).run_names()
