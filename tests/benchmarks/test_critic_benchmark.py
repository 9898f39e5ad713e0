"""The benchmark of critics: its exact figures against autograd, and unbiased baselines by enumeration of groups."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tinker import types
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

from benchmarks.critic import (
    ESTIMATORS,
    HISTORIES,
    NUM_CLASSES,
    NUM_PROBLEMS,
    NUM_TURNS,
    REWARDS,
    Games,
    Truth,
    enumerate_games,
    play,
    rewards_of,
)
from tasks.rl.advantages import AdvantageSettings, compute_token_advantages

LOGITS = torch.randn(
    NUM_PROBLEMS, len(HISTORIES), NUM_CLASSES, generator=torch.Generator().manual_seed(1), dtype=torch.float64
)


def truth_of(kind: str) -> Truth:
    return enumerate_games(LOGITS.softmax(-1), kind)


@pytest.mark.parametrize("kind", REWARDS)
def test_exact_gradient_is_that_of_autograd(kind: str) -> None:
    leaf = LOGITS.clone().requires_grad_()
    truth = enumerate_games(leaf.softmax(-1), kind)
    (gradient,) = torch.autograd.grad(truth.values_PH[:, 0].mean(), leaf)
    assert torch.allclose(truth.gradient_PHA.detach(), gradient, atol=1e-12)
    generator = torch.Generator().manual_seed(0)
    mean = play(truth_of(kind), kind, 4000, generator).rewards_DT.sum(1).mean().item()
    assert mean == pytest.approx(truth.reward, abs=0.02)


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize("name", ["leave_one_out", "per_turn"])
def test_baselines_of_the_group_are_unbiased(kind: str, name: str) -> None:
    """The mean gradient over all pairs of games of a problem is the exact one."""
    truth, games = truth_of(kind), torch.tensor(list(product(range(NUM_CLASSES), repeat=NUM_TURNS)))
    pairs = torch.tensor(list(product(range(len(games)), repeat=2)))
    classes_DT = games[pairs.flatten()]
    problems_D = torch.zeros(len(classes_DT), dtype=torch.int64)
    played = Games(
        problems_D,
        classes_DT,
        rewards_of(problems_D, classes_DT, kind),
        torch.arange(len(pairs)).repeat_interleave(2),
    )
    histories_DT, probabilities_HA = played.histories_DT, truth.probabilities_PHA[0]
    chances = probabilities_HA[histories_DT, classes_DT].prod(1).view(-1, 2).prod(1).repeat_interleave(2)
    advantages_DT = ESTIMATORS[name](played, (), None).double() * chances[:, None] / 2
    gradient_HA = torch.zeros_like(probabilities_HA)
    gradient_HA.index_put_((histories_DT, classes_DT), advantages_DT, accumulate=True)
    gradient_HA.index_put_(
        (histories_DT,), -advantages_DT[:, :, None] * probabilities_HA[histories_DT], accumulate=True
    )
    assert torch.allclose(gradient_HA, NUM_PROBLEMS * truth.gradient_PHA[0], atol=1e-6)


@pytest.mark.parametrize("name", ["group_mean", "leave_one_out", "per_turn", "discounted"])
def test_estimators_are_those_of_the_flow(name: str) -> None:
    played = play(truth_of("each turn"), "each turn", 8, torch.Generator().manual_seed(0))
    prompt = types.ModelInput.from_ints([1])
    groups = [
        TrajectoryGroup(
            [
                Trajectory(
                    [Transition(prompt, TokensWithLogprobs([7], [-1.0]), reward, False) for reward in row], prompt
                )
                for row in played.rewards_DT[played.groups_D == number].tolist()
            ],
            [0.0] * int((played.groups_D == number).sum()),
            [{}] * int((played.groups_D == number).sum()),
        )
        for number in range(8)
    ]
    expected = compute_token_advantages(groups, AdvantageSettings(estimator=name)).advantages_T
    assert torch.allclose(ESTIMATORS[name](played, (), None).flatten(), expected, atol=1e-6)
