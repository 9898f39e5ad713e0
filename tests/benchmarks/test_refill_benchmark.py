"""The benchmark of refills: its exact reward against sampled rewards, and the effect of rounds on the batch."""

from __future__ import annotations

import pytest
import torch

from benchmarks.off_policy import Policy, sample
from benchmarks.refill import NUM_PROMPTS, exact_reward, score, train


def test_exact_reward_is_the_mean_of_sampled_rewards() -> None:
    policy = Policy(0, NUM_PROMPTS)
    policy.head[2].bias.data[:] = torch.linspace(-2, 4, 24)  # few tokens have most of the probability
    prompts_D = torch.arange(NUM_PROMPTS).repeat_interleave(400)
    tokens_DT, _ = sample(policy, prompts_D, torch.Generator().manual_seed(1))
    rewards_D = score(tokens_DT, prompts_D)
    error = rewards_D.std().item() / len(rewards_D) ** 0.5
    assert rewards_D.mean().item() == pytest.approx(exact_reward(policy), abs=4 * error)
    assert exact_reward(policy) > 4 * error


def test_rounds_make_fewer_and_larger_updates() -> None:
    shrinking, refilled = (train(rounds, 0, 256, 5e-3) for rounds in (0, 3))
    assert refilled.num_updates < shrinking.num_updates
    assert 0 < refilled.reward < 1
