"""Reward after a fixed number of sampled tokens, with refilled groups and with a batch that shrinks.

The network of `off_policy` learns codes of one to four tokens; a completion that starts with the code of its prompt has
the reward 1, any other 0. Groups whose rewards are all equal are dropped. The peer drops them too and trains on fewer
groups, so that it makes more updates with the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, stdev
from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.off_policy import LENGTH, SEEDS, VOCABULARY, Policy, Samples, sample, update
from objectives import Objective

NUM_PROMPTS, GROUP_SIZE, GROUPS_PER_STEP = 32, 8, 8
ROUNDS = (0, 1, 3)
NUM_GROUPS = 6_000


class Run(NamedTuple):
    """Result of a run: exact mean reward at the end, updates, and sampled groups per trained group."""

    reward: float
    num_updates: int
    groups_per_trained: float


def measure(*, num_groups: int = NUM_GROUPS, learning_rate: float = 5e-3) -> Table:
    """Return the reward of each number of rounds, with the standard deviation over the seeds."""
    num_tokens = num_groups * GROUP_SIZE * LENGTH
    table = Table(title=f"Reward (at most 1) after {num_tokens:,} sampled tokens, over {len(SEEDS)} seeds")
    for column in ("refill_rounds", "reward", "updates", "sampled groups per trained group"):
        table.add_column(column, justify="right")
    for rounds in ROUNDS:
        runs = [train(rounds, seed, num_groups, learning_rate) for seed in SEEDS]
        rewards = [run.reward for run in runs]
        table.add_row(
            str(rounds),
            f"{fmean(rewards):.3f} ± {stdev(rewards):.3f}",
            f"{fmean(run.num_updates for run in runs):.0f}",
            f"{fmean(run.groups_per_trained for run in runs):.2f}",
        )
    return table


def train(rounds: int, seed: int, num_groups: int, learning_rate: float) -> Run:
    """Train until the groups are sampled; groups without use are replaced in up to `rounds` rounds of a step."""
    policy, generator = Policy(seed, NUM_PROMPTS), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
    objective, prompts = Objective("importance_sampling"), _prompts(generator)
    num_sampled = num_trained = num_updates = 0
    while num_sampled < num_groups:
        parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for _ in range(1 + rounds):
            chosen_P = torch.tensor([next(prompts) for _ in range(GROUPS_PER_STEP - len(parts))])
            if not len(chosen_P):
                break
            num_sampled += len(chosen_P)
            prompts_D = chosen_P.repeat_interleave(GROUP_SIZE)
            tokens_DT, logprobs_DT = sample(policy, prompts_D, generator)
            rewards_PG = score(tokens_DT, prompts_D).view(-1, GROUP_SIZE)
            groups = zip(*(part.split(GROUP_SIZE) for part in (prompts_D, tokens_DT, logprobs_DT)), strict=True)
            pairs = zip(rewards_PG, groups, strict=True)
            parts += [(rewards_G, *group) for rewards_G, group in pairs if len(rewards_G.unique()) > 1]
        if not parts:
            continue
        num_trained, num_updates = num_trained + len(parts), num_updates + 1
        advantages_D = torch.cat([rewards_G - rewards_G.mean() for rewards_G, *_ in parts])
        prompts_D, tokens_DT, sampling_DT = (torch.cat([part[index] for part in parts]) for index in (1, 2, 3))
        update(policy, optimizer, objective, Samples(prompts_D, tokens_DT, sampling_DT, advantages_D))
    return Run(exact_reward(policy), num_updates, num_sampled / max(num_trained, 1))


def _prompts(generator: torch.Generator) -> Iterator[int]:
    """Yield the prompts in a new order in each epoch."""
    while True:
        yield from torch.randperm(NUM_PROMPTS, generator=generator).tolist()


def _codes() -> Tensor:
    return torch.randint(VOCABULARY, (NUM_PROMPTS, LENGTH), generator=torch.Generator().manual_seed(0))


def _is_needed(prompts_D: Tensor) -> Tensor:
    """Mask of the positions that belong to the code of a prompt, ``(D, T)``: one to four."""
    return torch.arange(LENGTH) < (1 + prompts_D % 4)[:, None]


def score(tokens_DT: Tensor, prompts_D: Tensor) -> Tensor:
    """Return 1 for completions that start with the whole code of their prompt, and 0 for others, ``(D,)``."""
    return ((tokens_DT == _codes()[prompts_D]) | ~_is_needed(prompts_D)).all(1).float()


@torch.no_grad()
def exact_reward(policy: Policy) -> float:
    """Mean probability of the codes, the expected reward."""
    prompts_P, codes_PT = torch.arange(NUM_PROMPTS), _codes()
    logprobs_PT = policy(prompts_P, codes_PT).gather(2, codes_PT[:, :, None])[:, :, 0]
    return logprobs_PT.where(_is_needed(prompts_P), 0.0).sum(1).exp().mean().item()
