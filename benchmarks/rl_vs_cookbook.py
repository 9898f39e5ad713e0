"""rl flow in its three modes, against tinker-cookbook's RL loop in the same modes.

Both loops run in separate processes with the same engine, environments and settings. A step is timed from the moment
that the previous step logs its metrics until it logs its own, so work between steps counts. The first four steps are
left out, or the first half of a run with fewer than eight.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.flow_run import run_flow
from benchmarks.rows import Row
from benchmarks.scratch import KEY, bench_engine, environment, run_module, scratch_home
from blocks.files.local import home
from engine.models import resolve_model

WARM_UP = 4
LETTERS = "abcdefgh"
GROUP_SIZE = 4
RANK = 8
MAX_TOKENS = 16
RENDERER = "role_colon"
BUILDER = "examples.letters:LettersBuilder"
SLOW_BUILDER = "benchmarks.slow_letters:SlowLettersBuilder"
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "stream": {"mode": "stream", "num_minibatches": 2, "groups_per_batch": len(LETTERS)},
    "async": {"mode": "async", "max_steps_off_policy": 1, "groups_per_batch": len(LETTERS)},
}


def measure(*, repetitions: int = 3, steps: int = 24) -> list[Row]:
    """Return a row per mode, and one for async against sync with a tool that takes half a second per completion."""
    with scratch_home() as folder:
        model = str(resolve_model("tiny", home() / "cache"))
        with bench_engine(folder, model) as url, environment(TINKER_BASE_URL=url, TINKER_API_KEY=KEY):
            rows = [_row(folder, model, mode, repetitions, steps) for mode in MODES]
            return [*rows, _tools(folder, model, repetitions, steps)]


def _row(folder: Path, model: str, mode: str, repetitions: int, steps: int) -> Row:
    ours, theirs = [], []
    for number in tqdm(range(repetitions), desc=f"rl_vs_cookbook: {mode}"):
        ours.append(_run_flow(folder / f"flow-{mode}-{number}", model, mode, BUILDER, steps))
        logged = run_cookbook(folder / f"cookbook-{mode}-{number}", model, mode, {"max_steps": steps})
        theirs.append(_rate([step["logged_at"] for step in logged]))
    size = f"{len(LETTERS)} groups of {GROUP_SIZE}, {MAX_TOKENS} tokens"
    return Row(f"rl_vs_cookbook: {mode}, tiny, {size}", "steps/s", ours, theirs, "tinker_cookbook.rl.train")


def _tools(folder: Path, model: str, repetitions: int, steps: int) -> Row:
    async_rates, sync_rates = [], []
    for number in tqdm(range(repetitions), desc="rl_vs_cookbook: tools"):
        async_rates.append(_run_flow(folder / f"tools-async-{number}", model, "async", SLOW_BUILDER, steps))
        sync_rates.append(_run_flow(folder / f"tools-sync-{number}", model, "sync", SLOW_BUILDER, steps))
    return Row("rl_vs_cookbook: async, tool of 0.5 s", "steps/s", async_rates, sync_rates, "the flow's sync mode")


def flow_config(model: str, schedule: dict[str, Any], builder: str, steps: int) -> dict[str, Any]:
    """Return the config of the flow; it saves nothing between steps, and `run_flow` disables evaluations."""
    params = {"renderer_name": RENDERER, "letters": LETTERS, "group_size": GROUP_SIZE}
    return {
        "model": model,
        "lora_rank": RANK,
        "learning_rate": 1e-4,
        "num_steps": steps,
        "checkpoint_every": 1000,
        "granularity": "segment",
        "schedule": schedule,
        "rollout": {"max_tokens": MAX_TOKENS},
        "environment": {"builder": builder, "params": params},
    }


def _run_flow(folder: Path, model: str, mode: str, builder: str, steps: int) -> float:
    run = run_flow(["flows.rl"], folder, flow_config(model, MODES[mode], builder, steps))
    return _rate([point.timestamp / 1000 for point in run.points("loss/total")])


def run_cookbook(folder: Path, model: str, mode: str, changes: dict[str, Any]) -> list[dict[str, float]]:
    """Run the cookbook's loop and return the logged metrics of each step.

    Args:
        changes: options of the command line that differ from the defaults below.
    """
    folder.mkdir()
    groups = {"groups_per_batch": len(LETTERS)}
    modes: dict[str, dict[str, Any]] = {
        "sync": {},
        "stream": {"stream_minibatch_config": groups | {"num_minibatches": 2}},
        "async": {"async_config": groups | {"max_steps_off_policy": 1}},
    }
    nested = {f"{part}.{key}": value for part, fields in modes[mode].items() for key, value in fields.items()}
    options = {
        "log_path": folder,
        "model_name": model,
        "recipe_name": "bench",
        "renderer_name": RENDERER,
        "lora_rank": RANK,
        "learning_rate": 1e-4,
        "max_tokens": MAX_TOKENS,
        "eval_every": 0,
        "save_every": 0,
        "num_groups_to_log": 0,
        "dataset_builder": BUILDER,
        "dataset_builder.model_name_for_tokenizer": model,
        "dataset_builder.renderer_name": RENDERER,
        "dataset_builder.letters": LETTERS,
        "dataset_builder.group_size": GROUP_SIZE,
        **nested,
        **changes,
    }
    run_module(["benchmarks.cookbook", "rl", *(f"{key}={value}" for key, value in options.items())], folder / "log")
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # Only training steps log their progress; the file has lines of other work, too.
    return [step for step in logged if "progress/done_frac" in step]


def _rate(log_times: list[float]) -> float:
    """Return the steps per second from the log times of the steps."""
    steady = sorted(log_times)[min(WARM_UP, len(log_times) // 2) :]
    return (len(steady) - 1) / (steady[-1] - steady[0])
