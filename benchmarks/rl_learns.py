"""Final reward of the rl flow and tinker-cookbook's RL loop after the same number of steps, in each mode.

The figure is the mean reward of the last three steps, at most 1. Both loops have the same KL penalty to the base model;
without it, either may collapse to completions of one character. The cookbook's loop takes no seed, so its repetitions
differ by sampling.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from tqdm import tqdm

from benchmarks.flow_run import run_flow
from benchmarks.rl_vs_cookbook import BUILDER, MODES, flow_config, run_cookbook
from benchmarks.rows import Row
from benchmarks.scratch import KEY, bench_engine, environment, scratch_home
from blocks.files.local import home
from engine.models import resolve_model

LETTERS = "aa"  # two groups with the same letter
GROUP_SIZE = 8
MAX_TOKENS = 8
LEARNING_RATE = 1e-2
KL_COEFFICIENT = 0.01
LAST_STEPS = 3
REWARD = "env/all/reward/total"


def measure(*, seeds: int = 3, steps: int = 60) -> list[Row]:
    """Return one row per mode."""
    with scratch_home() as folder:
        model = str(resolve_model("tiny", home() / "cache"))
        with bench_engine(folder, model) as url, environment(TINKER_BASE_URL=url, TINKER_API_KEY=KEY):
            return [_row(folder, model, mode, seeds, steps) for mode in MODES]


def _row(folder: Path, model: str, mode: str, seeds: int, steps: int) -> Row:
    ours, theirs = [], []
    for seed in tqdm(range(seeds), desc=f"rl_learns: {mode}"):
        ours.append(_run_flow(folder / f"flow-{mode}-{seed}", model, mode, seed, steps))
        theirs.append(_run_cookbook(folder / f"cookbook-{mode}-{seed}", model, mode, steps))
    name = f"rl_learns: {mode}, tiny, {len(LETTERS)} groups of {GROUP_SIZE}, {steps} steps"
    return Row(name, "reward", ours, theirs, "tinker_cookbook.rl.train")


def _run_flow(folder: Path, model: str, mode: str, seed: int, steps: int) -> float:
    config = flow_config(model, MODES[mode] | {"groups_per_batch": len(LETTERS)}, BUILDER, steps) | {
        "seed": seed,
        "learning_rate": LEARNING_RATE,
        "lr_schedule": "constant",
        "rollout": {"max_tokens": MAX_TOKENS},
        "advantage": {"kl_coefficient": KL_COEFFICIENT},
    }
    config["environment"]["params"] |= {"letters": LETTERS, "group_size": GROUP_SIZE}
    return _final_reward([point.value for point in run_flow(["flows.rl"], folder, config).points(REWARD)])


def _run_cookbook(folder: Path, model: str, mode: str, steps: int) -> float:
    changes = {
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "max_tokens": MAX_TOKENS,
        "kl_penalty_coef": KL_COEFFICIENT,
        "kl_reference_config.base_model": model,
        "dataset_builder.letters": LETTERS,
        "dataset_builder.group_size": GROUP_SIZE,
    }
    group_count = {"stream": "stream_minibatch_config.groups_per_batch", "async": "async_config.groups_per_batch"}
    changes |= {group_count[mode]: len(LETTERS)} if mode in group_count else {}
    return _final_reward([step[REWARD] for step in run_cookbook(folder, model, mode, changes) if REWARD in step])


def _final_reward(rewards: list[float]) -> float:
    return fmean(rewards[-LAST_STEPS:])
