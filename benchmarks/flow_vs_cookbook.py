"""sft flow with cross-entropy alone, against tinker-cookbook's supervised loop.

Both loops run in separate processes with the same engine, dataset builder and number of steps. The dataset records the
time of each batch request, one per step in both loops. The time per step leaves out the first four steps and the last
two, and therefore start-up, final save and report. The flow is measured with `granularity: task` (a Prefect task run
per operation) and with `segment` (one per segment). Another row compares whole processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from benchmarks.flow_run import run_flow
from benchmarks.rows import Row
from benchmarks.scratch import environment, run_module, scratch_home
from blocks.files.local import home
from blocks.servers.processes import local_engine
from engine.models import resolve_model

WARM_UP = 4
BATCH_SIZE = 16
RANK = 8
LEARNING_RATE = 1e-3


class Trained(NamedTuple):
    """Result of one process: milliseconds per step, total seconds, loss of the last step in nats per token."""

    step_ms: float
    whole_s: float
    nll: float


def measure(*, repetitions: int = 3, steps: int = 40) -> list[Row]:
    """Return rows for the time per step with granularity `task` and `segment`, and one for the whole process."""
    ours, segments, peer = [], [], []
    with scratch_home() as folder:
        model = str(resolve_model("tiny", home() / "cache"))
        with local_engine(model=model, dtype="float32", threads=1) as service:
            assert service.base_url is not None
            assert service.api_key is not None
            with environment(TINKER_BASE_URL=service.base_url, TINKER_API_KEY=service.api_key.get_secret_value()):
                for number in tqdm(range(repetitions), desc="flow_vs_cookbook"):
                    ours.append(_run_flow(folder / f"flow-{number}", model, steps, "task"))
                    segments.append(_run_flow(folder / f"segment-{number}", model, steps, "segment"))
                    peer.append(_run_cookbook(folder / f"cookbook-{number}", model, steps))
    difference = max(abs(a.nll - b.nll) / b.nll for flows in (ours, segments) for a, b in zip(flows, peer, strict=True))
    size = f"tiny, batches of {BATCH_SIZE} GSM8K solutions"
    return [
        Row(
            f"flow_vs_cookbook: time per step, {size}",
            "ms",
            [run.step_ms for run in ours],
            [run.step_ms for run in peer],
            peer_name="tinker_cookbook.supervised.train",
            note=f"last train_mean_nll {ours[-1].nll:.4f} and {peer[-1].nll:.4f} in the last repetition; "
            f"at most {difference:.2%} apart in all repetitions, with either granularity",
        ),
        Row(
            f"flow_vs_cookbook: time per step with granularity segment, {size}",
            "ms",
            [run.step_ms for run in segments],
            [run.step_ms for run in peer],
            peer_name="tinker_cookbook.supervised.train",
        ),
        Row(
            f"flow_vs_cookbook: whole process, {steps} steps, {size}",
            "s",
            [run.whole_s for run in ours],
            [run.whole_s for run in peer],
            peer_name="tinker_cookbook.supervised.train",
            note="ours includes a local Prefect server, an MLflow store and a report",
        ),
    ]


def _run_flow(folder: Path, model: str, steps: int, granularity: str) -> Trained:
    times = folder / "times"
    config = {
        "model": model,
        "lora_rank": RANK,
        "learning_rate": LEARNING_RATE,
        "num_steps": steps,
        "checkpoint_every": steps,
        "granularity": granularity,
        "data": {"builder": "benchmarks.timed_data:TimedGsm8kBuilder", "params": _data(model, times)},
    }
    run = run_flow(["flows.sft"], folder, config)
    return Trained(_step_ms(times), run.whole_s, run.points("train_mean_nll")[-1].value)


def _run_cookbook(folder: Path, model: str, steps: int) -> Trained:
    folder.mkdir()
    times = folder / "times"
    options = {
        "log_path": folder,
        "model_name": model,
        "recipe_name": "bench",
        "renderer_name": "qwen3_instruct",
        "lora_rank": RANK,
        "learning_rate": LEARNING_RATE,
        "max_steps": steps,
        "eval_every": 0,
        "save_every": 0,
        "dataset_builder": "benchmarks.timed_data:TimedGsm8kBuilder",
        **{f"dataset_builder.{key}": value for key, value in _data(model, times).items()},
    }
    arguments = [f"{key}={value}" for key, value in options.items()]
    whole_s = run_module(["benchmarks.cookbook", "sft", *arguments], folder / "log")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return Trained(_step_ms(times), whole_s, json.loads(lines[-1])["train_mean_nll"])


def _data(model: str, times: Path) -> Mapping[str, str | int]:
    return {
        "times": str(times),
        "common_config.model_name_for_tokenizer": model,
        "common_config.renderer_name": "qwen3_instruct",
        "common_config.max_length": 256,
        "common_config.batch_size": BATCH_SIZE,
    }


def _step_ms(times: Path) -> float:
    """Return the mean time between batch requests, without the first `WARM_UP` steps and the last two."""
    request_times = [float(line) for line in times.read_text().splitlines()]
    steady = request_times[min(WARM_UP, len(request_times) // 2 - 1) : -1]
    return 1000 * (steady[-1] - steady[0]) / (len(steady) - 1)
