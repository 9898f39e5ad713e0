"""A long run stays flat: the memory of its flow and the Prefect database, with a task run for every task and without.

The same steps twice: with `granularity: task`, the default, and with `segment`, where the steps between two
checkpoints are one task run. Memory and database are looked at while the run goes on; what they had reached after a
tenth of the steps is where the growth is counted from.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from bisect import bisect_right
from pathlib import Path
from typing import NamedTuple

import psutil
import yaml
from mlflow import MlflowClient
from tqdm import tqdm

from benchmarks.rows import Row
from benchmarks.scratch import scratch_home
from blocks.home import home

LOOK_EVERY_S = 0.5
NUM_CHECKPOINTS = 10
MIB = 2**20


class Grown(NamedTuple):
    """From a tenth of the steps to the last one: MiB of the flow's process, KiB of the database per step."""

    memory_mib: float
    database_kib: float


class Look(NamedTuple):
    time_s: float
    memory_bytes: int
    database_bytes: int


def measure(*, steps: int = 10_000) -> list[Row]:
    """A row for the memory and one for the database."""
    with scratch_home() as folder:
        by_task, by_segment = (
            _run(folder / granularity, granularity, steps) for granularity in tqdm(("task", "segment"), desc="long_run")
        )
    size = f"{steps} steps, tiny, batches of 2"
    return [
        Row(
            f"long_run: growth of the flow's memory, {size}",
            "MiB",
            [by_task.memory_mib],
            [by_segment.memory_mib],
            peer_name="granularity: segment",
        ),
        Row(
            f"long_run: growth of the Prefect database per step, {size}",
            "KiB",
            [by_task.database_kib],
            [by_segment.database_kib],
            peer_name="granularity: segment",
        ),
    ]


def _run(folder: Path, granularity: str, steps: int) -> Grown:
    folder.mkdir()
    tracking = f"sqlite:///{folder / 'mlflow.db'}"
    config = {
        "run_name": f"long-{granularity}",
        "model": "tiny",
        "lora_rank": 2,
        "num_steps": steps,
        "num_epochs": steps,
        "eval_every": 0,
        "checkpoint_every": steps // NUM_CHECKPOINTS,
        "granularity": granularity,
        "storage": str(folder),
        "tracking": tracking,
        "data": {
            "builder": "tinker_cookbook.supervised.data:FromConversationFileBuilder",
            "params": {"file_path": str(_data(folder)), "common_config": _COMMON},
        },
        "objective": {"regularizers": [{"name": "confidence", "weight": 0.1}]},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.sft", "--config", str(folder / "config.yaml")],
            stdout=output,
            stderr=output,
            cwd=Path(__file__).parent.parent,
        )
        looks = _look_until_the_end(process)
    if process.returncode:
        raise RuntimeError(f"flows.sft ended with {process.returncode}: {log.read_text()[-2000:]}")
    record = json.loads((folder / f"long-{granularity}" / "checkpoints.jsonl").read_text().splitlines()[-1])
    points = MlflowClient(tracking).get_metric_history(record["mlflow_run_id"], "loss/total")
    logged_s = {point.step: point.timestamp / 1000 for point in points}
    warm, last = _at(looks, logged_s[steps // 10]), _at(looks, logged_s[steps - 1])
    return Grown(
        (last.memory_bytes - warm.memory_bytes) / MIB,
        (last.database_bytes - warm.database_bytes) / 1024 / (steps - 1 - steps // 10),
    )


def _look_until_the_end(process: subprocess.Popen[bytes]) -> list[Look]:
    looks: list[Look] = []
    flow = psutil.Process(process.pid)
    while process.poll() is None:
        database = sum(file.stat().st_size for file in home().glob("prefect.db*"))
        try:
            looks.append(Look(time.time(), flow.memory_info().rss, database))
        except psutil.NoSuchProcess:
            break
        time.sleep(LOOK_EVERY_S)
    process.wait()
    return looks


def _at(looks: list[Look], time_s: float) -> Look:
    return looks[bisect_right([look.time_s for look in looks], time_s) - 1]


_COMMON = {"renderer_name": "qwen3_instruct", "max_length": 64, "batch_size": 2}


def _data(folder: Path) -> Path:
    path = folder / "sums.jsonl"
    turns = [(f"{n} + 1?", str(n + 1)) for n in range(128)]
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in turns
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
