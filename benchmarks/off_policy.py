"""Reward after a fixed number of tokens, by correction and by the age of the sampler.

A small network learns a code of several tokens for each of its prompts; the reward is the share of the code up to the
first wrong token. The sampler's weights are those of 1, 4 or 16 updates ago, and the losses and corrections are those
of `flows.rl`. The peer is the same base loss without a correction.
"""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from statistics import fmean, stdev
from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn

from objectives import Objective, evaluate_base
from objectives.batch import Batch, Outputs
from objectives.losses.policy.correction import Correction

NUM_PROMPTS, GROUP_SIZE, LENGTH, VOCABULARY = 4, 16, 8, 24
AGES, SEEDS = (1, 4, 16), (0, 1, 2)
BASE_LOSS = "importance_sampling"
CORRECTIONS: dict[str, Correction | None] = {
    "none": None,
    "recomputed, no ratio": Correction(ratio="none"),
    "token ratio, truncated at 2": Correction(ratio="token", high=2.0),
    "token ratio, masked outside 0.5 to 2": Correction(ratio="token", bound="mask", low=0.5, high=2.0),
    "sequence ratio, truncated at 2": Correction(ratio="sequence", high=2.0),
    "sequence ratio, masked outside 0.5 to 2": Correction(ratio="sequence", bound="mask", low=0.5, high=2.0),
    "geometric mean within 0.9 to 1.1": Correction(sequence_low=0.9, sequence_high=1.1),
    "off-policy mask at 0.05": Correction(off_policy_above=0.05),
    "trust region 0.1": Correction(trust_region=0.1),
    "token ratio truncated, off-policy mask": Correction(ratio="token", high=2.0, off_policy_above=0.05),
}


class Policy(nn.Module):
    """Logits of the next token from the prompt, the position and the previous token."""

    def __init__(self, seed: int, num_prompts: int = NUM_PROMPTS) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.prompt, self.position, self.previous = (
            nn.Embedding(size, 32) for size in (num_prompts, LENGTH, VOCABULARY + 1)
        )
        self.head = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, VOCABULARY))

    def forward(self, prompts_D: Tensor, tokens_DT: Tensor) -> Tensor:
        """Logprobs of the token after each prefix, ``(D, T, V)``."""
        previous_DT = torch.cat([torch.full((len(tokens_DT), 1), VOCABULARY), tokens_DT[:, :-1]], 1)
        positions_T = torch.arange(tokens_DT.shape[1])
        hidden = self.prompt(prompts_D)[:, None] + self.position(positions_T) + self.previous(previous_DT)
        return self.head(hidden).log_softmax(-1)


class Samples(NamedTuple):
    """Sampled completions.

    Attributes:
        prompts_D: prompt of each completion.
        tokens_DT: its tokens.
        logprobs_DT: their logprobs under the sampler, nats.
        advantages_D: advantage of each completion.
    """

    prompts_D: Tensor
    tokens_DT: Tensor
    logprobs_DT: Tensor
    advantages_D: Tensor


def update(policy: Policy, optimizer: torch.optim.Optimizer, objective: Objective, samples: Samples) -> None:
    """Train a policy on samples by the base loss of an objective."""
    prompts_D, tokens_DT, sampling_DT, advantages_D = samples
    logprobs = policy(prompts_D, tokens_DT).gather(2, tokens_DT[:, :, None]).flatten()
    batch = Batch(
        tokens_DT.flatten(),
        torch.ones(tokens_DT.numel()),
        LENGTH * torch.arange(len(tokens_DT) + 1),
        advantages_DT=advantages_D.repeat_interleave(LENGTH),
        sampling_logprobs_DT=sampling_DT.flatten(),
    )
    outputs = Outputs(logprobs.detach(), sampling_logprobs_DT=sampling_DT.flatten())
    optimizer.zero_grad()
    logprobs.backward(evaluate_base(objective.base, outputs, batch).gradient_DT)
    optimizer.step()


def measure(*, num_steps: int = 250, learning_rate: float = 5e-3) -> Table:
    """Return the mean reward of the last tenth of the steps with its standard deviation over the seeds."""
    num_tokens = num_steps * NUM_PROMPTS * GROUP_SIZE * LENGTH
    table = Table(
        title=f"Reward (at most 1) after {num_tokens:,} tokens, over {len(SEEDS)} seeds", title_justify="left"
    )
    table.add_column("correction")
    for age in AGES:
        table.add_column(f"age {age}", justify="right")
    for name, correction in CORRECTIONS.items():
        cells = []
        for age in AGES:
            rewards = [train(correction, age, seed, num_steps, learning_rate) for seed in SEEDS]
            cells.append(f"{fmean(rewards):.3f} ± {stdev(rewards):.3f}")
        table.add_row(name, *cells)
    return table


def train(correction: Correction | None, age: int, seed: int, num_steps: int, learning_rate: float) -> float:
    """Train on samples of weights of an age; return the mean reward of the policy over the last tenth of the steps."""
    policy, generator = Policy(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
    samplers = deque([deepcopy(policy)], maxlen=age + 1)
    objective = Objective(BASE_LOSS)
    objective.correct(correction)
    prompts_D = torch.arange(NUM_PROMPTS).repeat_interleave(GROUP_SIZE)
    rewards: list[float] = []
    for _ in range(num_steps):
        tokens_DT, sampling_DT = sample(samplers[0], prompts_D, generator)
        rewards_D = score(tokens_DT, prompts_D)
        groups = rewards_D.view(NUM_PROMPTS, GROUP_SIZE)
        advantages_D = (groups - groups.mean(1, keepdim=True)).flatten()
        update(policy, optimizer, objective, Samples(prompts_D, tokens_DT, sampling_DT, advantages_D))
        samplers.append(deepcopy(policy))
        rewards.append(reward_of(policy, prompts_D))
    return fmean(rewards[-num_steps // 10 :])


@torch.no_grad()
def sample(policy: Policy, prompts_D: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a completion of each prompt; return its tokens and their logprobs, ``(D, T)``."""
    tokens_DT = torch.zeros(len(prompts_D), LENGTH, dtype=torch.int64)
    logprobs_DT = torch.zeros(len(prompts_D), LENGTH)
    for position in range(LENGTH):
        logprobs_DV = policy(prompts_D, tokens_DT[:, : position + 1])[:, position]
        drawn_D1 = logprobs_DV.exp().multinomial(1, generator=generator)
        tokens_DT[:, position] = drawn_D1[:, 0]
        logprobs_DT[:, position] = logprobs_DV.gather(1, drawn_D1)[:, 0]
    return tokens_DT, logprobs_DT


@torch.no_grad()
def reward_of(policy: Policy, prompts_D: Tensor) -> float:
    """Mean reward of the policy, from one completion of each prompt with fixed random numbers."""
    tokens_DT, _ = sample(policy, prompts_D, torch.Generator().manual_seed(0))
    return score(tokens_DT, prompts_D).mean().item()


def score(tokens_DT: Tensor, prompts_D: Tensor) -> Tensor:
    """Share of the tokens before the first wrong one, ``(D,)``."""
    codes = torch.randint(VOCABULARY, (NUM_PROMPTS, LENGTH), generator=torch.Generator().manual_seed(0))
    return (tokens_DT == codes[prompts_D]).cumprod(1).float().mean(1)
