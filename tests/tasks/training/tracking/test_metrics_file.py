"""metrics.jsonl: one line per step in tinker-cookbook's format, also after a kill, without waiting for the disk."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from tinker_cookbook.stores.storage import LocalStorage
from tinker_cookbook.stores.training_store import TrainingRunStore

from blocks import RunStorage
from blocks.errors import StorageError
from blocks.storage import RunDirectory
from tasks.training.tracking.metrics_file import METRICS_NAME, MetricsFile

NUM_STEPS = 400
# A run of steps of about a millisecond; the first step to run is read from a file, as from a checkpoint.
WRITER = f"""
import sys, time
from pathlib import Path
from blocks import RunStorage
from tasks.training.tracking.metrics_file import MetricsFile
folder = Path(sys.argv[1])
checkpoint = folder / "checkpoint"
first = int(checkpoint.read_text()) if checkpoint.exists() else 0
with RunStorage(url=str(folder)).run_directory("run") as directory:
    file = MetricsFile(directory, first)
    for step in range(first, {NUM_STEPS}):
        file.log(step, {{"loss": step / 8}})
        time.sleep(0.001)
        if step % 50 == 49:
            file.flush()
            new = folder / "checkpoint.new"
            new.write_text(str(step + 1))
            new.replace(checkpoint)  # a kill between truncation and write would leave an empty file
    file.flush()
"""


def directory_in(folder: Path) -> RunDirectory:
    return RunStorage(url=str(folder)).run_directory("run")


def steps_of(directory: RunDirectory) -> list[int]:
    return [json.loads(line)["step"] for line in (directory.read_bytes(METRICS_NAME) or b"").splitlines()]


def test_readers_of_tinker_cookbook_and_pandas(tmp_path: Path) -> None:
    """The lines are those that tinker-cookbook writes for the same metrics."""
    directory = directory_in(tmp_path / "ours")
    metrics = [
        {"progress/batch": 0, "loss": 1.5, "gone": math.nan},
        {"progress/batch": 1, "loss": 0.1, "test/nll": 2.0},
    ]
    file = MetricsFile(directory, 0)
    theirs = TrainingRunStore(LocalStorage(tmp_path / "theirs"))
    for step, line in enumerate(metrics):
        file.log(step, line)
        theirs.write_metrics(line, step)
    file.flush()
    path = tmp_path / "ours" / "run" / METRICS_NAME
    assert path.read_text() == (tmp_path / "theirs" / METRICS_NAME).read_text()
    assert TrainingRunStore(LocalStorage(path.parent)).read_metrics()[1] == {"step": 1, **metrics[1]}
    table = pd.read_json(path, lines=True)
    assert list(table["step"]) == [0, 1]
    assert list(table["loss"]) == [1.5, 0.1]
    assert table["gone"].isna().tolist() == [True, True]


def test_resumed_run_drops_later_and_torn_lines(tmp_path: Path) -> None:
    directory = directory_in(tmp_path)
    file = MetricsFile(directory, 0)
    for step in range(6):
        file.log(step, {"loss": 1.0})
    file.flush()
    path = tmp_path / "run" / METRICS_NAME
    with path.open("a") as stream:
        stream.write('{"step": 6, "lo')
    again = MetricsFile(directory, 4)
    again.flush()
    assert len(path.read_text().splitlines()) == 7  # a resume that fails before its first step removes nothing
    for step in range(4, 9):
        again.log(step, {"loss": 2.0})
    again.log(9, {"test/nll": 1.0})
    again.flush()
    assert steps_of(directory) == list(range(10))
    assert [json.loads(line).get("loss") for line in path.read_text().splitlines()] == [1.0] * 4 + [2.0] * 5 + [None]
    before = path.read_bytes()
    MetricsFile(directory, 9).flush()  # a finished run keeps its final evaluation
    assert path.read_bytes() == before


@pytest.mark.process
def test_killed_writers_leave_one_line_per_step(tmp_path: Path, moments: random.Random) -> None:
    for attempt in range(5):
        is_last = attempt == 4
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=Path.cwd())
        if is_last:
            assert process.wait(timeout=120) == 0
            break
        deadline = time.monotonic() + 60
        reached = moments.randrange(20, 80) * (attempt + 1)
        while time.monotonic() < deadline and len(steps_or_none(tmp_path)) < reached and process.poll() is None:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    rows = [json.loads(line) for line in (tmp_path / "run" / METRICS_NAME).read_text().splitlines()]
    assert rows == [{"step": step, "loss": step / 8} for step in range(NUM_STEPS)]


def steps_or_none(folder: Path) -> list[bytes]:
    path = folder / "run" / METRICS_NAME
    return path.read_bytes().splitlines() if path.exists() else []


class SlowDirectory:
    """Storage whose appends take a while, and fail while `is_full`."""

    location = "slow"

    def __init__(self, seconds: float) -> None:
        self.seconds, self.is_full, self.appends = seconds, False, list[str]()

    def read_bytes(self, name: str) -> bytes | None:
        return None

    def append_line(self, name: str, line: str) -> None:
        time.sleep(self.seconds)
        if self.is_full:
            raise StorageError("full")
        self.appends.append(line)


def test_no_step_waits_for_the_storage() -> None:
    """Steps of 100 metrics cost less than 1 ms of processor time each beside appends of 0.2 s."""
    directory = SlowDirectory(0.2)
    file = MetricsFile(directory, 0)  # pyright: ignore[reportArgumentType]
    metrics = {f"metric/{index}": index / 7 for index in range(100)}
    began = time.process_time()
    slowest = 0.0
    for step in range(400):
        at = time.perf_counter()
        file.log(step, metrics)
        slowest = max(slowest, time.perf_counter() - at)
    assert time.process_time() - began < 0.4
    assert slowest < 0.2
    file.flush()
    lines = "\n".join(directory.appends).splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(400))
    assert len(directory.appends) <= 3


def test_failed_append_is_repeated_and_reported() -> None:
    directory = SlowDirectory(0.0)
    directory.is_full = True
    file = MetricsFile(directory, 0)  # pyright: ignore[reportArgumentType]
    file.log(0, {"loss": 1.0})
    with pytest.raises(StorageError, match="full"):
        file.flush()
    directory.is_full = False
    file.log(1, {"loss": 2.0})
    file.flush()
    lines = "\n".join(directory.appends).splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
