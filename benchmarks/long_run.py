"""Growth of a long run's memory and Prefect database, with one task run per task and with one per segment.

The same steps run with `granularity: task`, the default, and with `segment`, where the steps between two checkpoints
are one task run. Memory and database size are sampled during the run; growth counts after the first tenth of the steps.
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
from blocks.files.local import home

SAMPLE_EVERY_S = 0.5
NUM_CHECKPOINTS = 10
MIB = 2**20


class Growth(NamedTuple):
    """Growth from a tenth of the steps to the last one: MiB of the flow process, KiB of the database per step."""

    memory_mib: float
    database_kib: float


class Sample(NamedTuple):
    """Memory of the flow process and size of Prefect's database at a moment of the run."""

    time_s: float
    memory_bytes: int
    database_bytes: int


def measure(*, steps: int = 10_000) -> list[Row]:
    """Return a row for the memory and one for the database."""
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


def _run(folder: Path, granularity: str, steps: int) -> Growth:
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
        samples = _sample_until_exit(process)
    if process.returncode:
        raise RuntimeError(f"flows.sft exited with status {process.returncode}: {log.read_text()[-2000:]}")
    record = json.loads((folder / f"long-{granularity}" / "checkpoints.jsonl").read_text().splitlines()[-1])
    points = MlflowClient(tracking).get_metric_history(record["mlflow_run_id"], "loss/total")
    logged_s = {point.step: point.timestamp / 1000 for point in points}
    warm, last = _at(samples, logged_s[steps // 10]), _at(samples, logged_s[steps - 1])
    return Growth(
        (last.memory_bytes - warm.memory_bytes) / MIB,
        (last.database_bytes - warm.database_bytes) / 1024 / (steps - 1 - steps // 10),
    )


def _sample_until_exit(process: subprocess.Popen[bytes]) -> list[Sample]:
    samples: list[Sample] = []
    flow = psutil.Process(process.pid)
    while process.poll() is None:
        database = sum(file.stat().st_size for file in home().glob("prefect.db*"))
        try:
            samples.append(Sample(time.time(), flow.memory_info().rss, database))
        except psutil.NoSuchProcess:
            break
        time.sleep(SAMPLE_EVERY_S)
    process.wait()
    return samples


def _at(samples: list[Sample], time_s: float) -> Sample:
    return samples[bisect_right([sample.time_s for sample in samples], time_s) - 1]


_COMMON = {"renderer_name": "qwen3_instruct", "max_length": 64, "batch_size": 2}


def _data(folder: Path) -> Path:
    path = folder / "sums.jsonl"
    turns = [(f"{n} + 1?", str(n + 1)) for n in range(128)]
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in turns
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
