"""dpo flow, against tinker-cookbook's DPO loop.

Both loops run in separate processes with the same engine, data and initial adapter. They train on the same batches and
must have the same losses. Each loop reports its own step times; the first steps are excluded. The flow uses one task
run for all its steps (`granularity: segment`). The second row uses an engine that works in cycles, as the hosted
service does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import tinker
from tqdm import tqdm

from benchmarks.flow_run import run_flow
from benchmarks.rows import Row
from benchmarks.scratch import KEY, bench_engine, environment, run_module, scratch_home
from blocks.files.local import home
from engine.models import resolve_model
from examples.preferences import DATA

WARM_UP = 4
BATCH_SIZE = 16
RANK = 8
LEARNING_RATE = 1e-4
MAX_LENGTH = 256
RENDERER = "qwen3_instruct"
JSONL = "tinker_cookbook.preference.preference_datasets:ComparisonBuilderFromJsonl"
PEER = "tinker_cookbook.preference.train_dpo"


class Trained(NamedTuple):
    """Result of one process: steps per second and the loss of each step."""

    rate: float
    losses: list[float]


def measure(*, repetitions: int = 3, epochs: int = 3, cycle_s: float = 1.0) -> list[Row]:
    """Return a row for an engine that computes immediately and one for an engine with a clock."""
    return [
        _row("immediate engine", repetitions, epochs, None),
        _row(f"engine with --clock-cycle {cycle_s:g}", 1, 1, cycle_s),
    ]


def _row(engine: str, repetitions: int, epochs: int, cycle_s: float | None) -> Row:
    ours, peer = [], []
    with scratch_home() as folder:
        model = str(resolve_model("tiny", home() / "cache"))
        with (
            bench_engine(folder, model, cycle_s) as url,
            environment(TINKER_BASE_URL=url, TINKER_API_KEY=KEY),
            tinker.ServiceClient() as session,
        ):
            trainer = session.create_lora_training_client(model, rank=RANK, seed=0).result()
            start = trainer.save_state("start").result().path
            for number in tqdm(range(repetitions), desc="dpo_vs_cookbook"):
                ours.append(_run_flow(folder / f"flow-{number}", model, start, epochs))
                peer.append(_run_cookbook(folder / f"cookbook-{number}", model, start, epochs))
    return Row(
        f"dpo_vs_cookbook: steps per second, tiny, {BATCH_SIZE} pairs, {epochs} epochs, {engine}",
        "steps/s",
        [run.rate for run in ours],
        [run.rate for run in peer],
        peer_name=PEER,
        note=_compare(ours[-1].losses[:20], peer[-1].losses[:20]),
    )


def _compare(ours: list[float], theirs: list[float]) -> str:
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    lists = "; theirs ".join(" ".join(f"{loss:.5f}" for loss in losses) for losses in (ours, theirs))
    return f"losses of the first {len(ours)} steps at most {apart:.1e} apart: ours {lists}"


def _run_flow(folder: Path, model: str, start: str, epochs: int) -> Trained:
    config = {
        "model": model,
        "lora_rank": RANK,
        "init_from": start,
        "learning_rate": LEARNING_RATE,
        "num_epochs": epochs,
        "checkpoint_every": 1000,
        "granularity": "segment",
        "renderer_name": RENDERER,
        "batch_size": BATCH_SIZE,
        "max_length": MAX_LENGTH,
        "comparisons": {"builder": JSONL, "params": {"train_path": str(DATA / "preferences_train.jsonl")}},
    }
    run = run_flow(["flows.dpo"], folder, config)
    losses, times = ([point.value for point in run.points(key)] for key in ("dpo_loss", "time/step"))
    return Trained(_rate(times), losses)


def _run_cookbook(folder: Path, model: str, start: str, epochs: int) -> Trained:
    folder.mkdir()
    options = {
        "log_path": folder,
        "model_name": model,
        "recipe_name": "bench",
        "renderer_name": RENDERER,
        "lora_rank": RANK,
        "load_checkpoint_path": start,
        "learning_rate": LEARNING_RATE,
        "num_epochs": epochs,
        "eval_every": 0,
        "infrequent_eval_every": 0,
        "save_every": 0,
        "dataset_builder": "tinker_cookbook.preference.dpo_datasets:DPODatasetBuilderFromComparisons",
        "dataset_builder.comparison_builder": JSONL,
        "dataset_builder.comparison_builder.train_path": DATA / "preferences_train.jsonl",
        "dataset_builder.common_config.model_name_for_tokenizer": model,
        "dataset_builder.common_config.renderer_name": RENDERER,
        "dataset_builder.common_config.max_length": MAX_LENGTH,
        "dataset_builder.common_config.batch_size": BATCH_SIZE,
    }
    run_module(["benchmarks.cookbook", "dpo", *(f"{key}={value}" for key, value in options.items())], folder / "log")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Trained(
        _rate([step["time/total"] for step in steps if "time/total" in step]),
        [step["dpo_loss"] for step in steps if "dpo_loss" in step],
    )


def _rate(times: list[float]) -> float:
    steady = times[min(WARM_UP, len(times) // 2) :]
    return len(steady) / sum(steady)
