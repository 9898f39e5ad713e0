"""Reward after a fixed number of sampled tokens, with refilled groups and with a batch that shrinks.

The flow `rl` trains the tiny model on `token_classes`, whose rewards are 0 or 1. Groups whose rewards are all equal are
dropped. With `refill_rounds` 1 or 3, the flow samples new groups in their place; with 0, the batch shrinks, so the same
number of sampled tokens gives more steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
from mlflow.entities import Metric
from rich.table import Table
from tqdm import tqdm

from benchmarks.flow_run import run_flow
from benchmarks.scratch import KEY, bench_engine, environment, scratch_home

GROUPS_PER_STEP, GROUP_SIZE, LENGTH = 8, 8, 4
ROUNDS, SEEDS = (0, 1, 3), (0, 1, 2)
EVAL_EVERY = 10
NUM_STEPS = 80


class Run(NamedTuple):
    """Result of a run after the compared number of sampled tokens.

    Attributes:
        reward: mean reward of held-out completions, interpolated between two evaluations.
        num_steps: steps that fit into the compared number of sampled tokens.
        groups_per_trained: groups sampled for each group that is trained on.
    """

    reward: float
    num_steps: int
    groups_per_trained: float


def measure(*, num_steps: int = NUM_STEPS, learning_rate: float = 5e-3) -> Table:
    """Return the reward of each number of rounds, with the standard deviation over the seeds.

    The compared number of tokens is that of `num_steps` steps without refills.
    """
    num_tokens = num_steps * GROUPS_PER_STEP * GROUP_SIZE * LENGTH
    table = Table(title=f"Reward (at most 1) after {num_tokens:,} sampled tokens, over {len(SEEDS)} seeds")
    for column in ("refill_rounds", "reward", "steps", "sampled groups per trained group"):
        table.add_column(column, justify="right")
    with (
        scratch_home() as folder,
        bench_engine(folder, "tiny") as url,
        environment(TINKER_BASE_URL=url, TINKER_API_KEY=KEY),
    ):
        for rounds in ROUNDS:
            runs = [
                train(folder / f"{rounds}-{seed}", rounds, seed, num_steps, learning_rate)
                for seed in tqdm(SEEDS, desc=f"refill: {rounds} rounds")
            ]
            rewards = [run.reward for run in runs]
            table.add_row(
                str(rounds),
                f"{fmean(rewards):.3f} ± {stdev(rewards):.3f}",
                f"{fmean(run.num_steps for run in runs):.0f}",
                f"{fmean(run.groups_per_trained for run in runs):.2f}",
            )
    return table


def train(folder: Path, rounds: int, seed: int, num_steps: int, learning_rate: float) -> Run:
    """Run the flow.

    Return its figures at the point where it has sampled as many tokens as `num_steps` steps sample without refills.
    """
    params = {
        "groups_per_batch": GROUPS_PER_STEP,
        "group_size": GROUP_SIZE,
        "num_epochs": 4 * num_steps,
        "test_size": 32,
        "seed": seed,
    }
    config = {
        "model": "tiny",
        "lora_rank": 8,
        "seed": seed,
        "learning_rate": learning_rate,
        "lr_schedule": "constant",
        "num_steps": num_steps,
        "eval_every": EVAL_EVERY,
        "checkpoint_every": 0,
        "granularity": "segment",
        "objective": {"base_loss": "importance_sampling"},
        "advantage": {"drop_constant": True},
        "rollout": {"max_tokens": LENGTH, "refill_rounds": rounds},
        "environment": {"builder": "benchmarks.token_classes:ClassesBuilder", "params": params},
    }
    run = run_flow(["flows.rl"], folder, config)
    num_tokens = num_steps * GROUPS_PER_STEP * GROUP_SIZE * LENGTH
    tokens, rewards, per_trained = (
        run.points(key)
        for key in ("rollout/num_sampled_tokens", "test/env/all/reward/total", "rollout/groups_per_trained")
    )
    within = list(takewhile(lambda total: total <= num_tokens, accumulate(point.value for point in tokens)))
    return Run(
        reward_at(num_tokens, tokens, rewards),
        len(within),
        fmean(point.value for point in per_trained[: len(within)]),
    )


def reward_at(num_tokens: float, tokens: Sequence[Metric], rewards: Sequence[Metric]) -> float:
    """Interpolate the reward of evaluations by the tokens that were sampled before them.

    Args:
        tokens: sampled tokens of each step.
        rewards: reward of each evaluation, whose step is the number of steps before it.
    """
    before = [0.0, *accumulate(point.value for point in tokens)]
    return float(np.interp(num_tokens, [before[point.step] for point in rewards], [point.value for point in rewards]))
