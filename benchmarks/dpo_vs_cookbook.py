"""The dpo flow, against tinker-cookbook's own DPO loop.

Both run as processes of their own, on the same engine, the same rows and the same adapter to begin with, so that they
train on the same batches and have to have the same losses. A step's time is what each loop notes of itself; the first
steps are left out. The flow has one task run for all its steps (`granularity: segment`). The second row is of an engine
that works in cycles, as the hosted service does.
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
from blocks.home import home
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
    """One process: steps per second, and the loss of each step."""

    rate: float
    losses: list[float]


def measure(*, repetitions: int = 3, epochs: int = 3, cycle_s: float = 1.0) -> list[Row]:
    """A row for an engine that works at once, and one for an engine with a clock."""
    return [
        _row("an engine that works at once", repetitions, epochs, None),
        _row(f"an engine with --clock-cycle {cycle_s:g}", 1, 1, cycle_s),
    ]


def _row(what: str, repetitions: int, epochs: int, cycle_s: float | None) -> Row:
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
        f"dpo_vs_cookbook: steps per second, tiny, {BATCH_SIZE} pairs, {epochs} epochs, {what}",
        "steps/s",
        [run.rate for run in ours],
        [run.rate for run in peer],
        peer_name=PEER,
        note=_compared(ours[-1].losses[:20], peer[-1].losses[:20]),
    )


def _compared(ours: list[float], theirs: list[float]) -> str:
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    lists = "; theirs ".join(" ".join(f"{loss:.5f}" for loss in each) for each in (ours, theirs))
    return f"losses of the first {len(ours)} steps at most {apart:.1e} apart: ours {lists}"


def _run_flow(folder: Path, model: str, start: str, epochs: int) -> Trained:
    config = {
        "model": model,
        "lora_rank": RANK,
        "resume": start,
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
    run_module(["benchmarks.cookbook_dpo", *(f"{key}={value}" for key, value in options.items())], folder / "log")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Trained(
        _rate([step["time/total"] for step in steps if "time/total" in step]),
        [step["dpo_loss"] for step in steps if "dpo_loss" in step],
    )


def _rate(times: list[float]) -> float:
    steady = times[min(WARM_UP, len(times) // 2) :]
    return len(steady) / sum(steady)
