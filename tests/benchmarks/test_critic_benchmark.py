"""The benchmark of critics: exact figures against autograd, and bias and variance by enumeration of groups."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

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


def moments_of(name: str, kind: str) -> tuple[Tensor, float]:
    """Mean and total variance of the gradient of a pair of games of problem 0, by a sum over all pairs.

    A critic is fitted on other games first.
    """
    truth, games = truth_of(kind), torch.tensor(list(product(range(NUM_CLASSES), repeat=NUM_TURNS)))
    estimator, generator = ESTIMATORS[name](), torch.Generator().manual_seed(0)
    for _ in range(4):
        estimator(play(truth, kind, NUM_PROBLEMS, generator), truth)
    pairs = torch.tensor(list(product(range(len(games)), repeat=2)))
    classes_DT = games[pairs.flatten()]
    problems_D = torch.zeros(len(classes_DT), dtype=torch.int64)
    rewards_DT = rewards_of(problems_D, classes_DT, kind)
    played = Games(problems_D, classes_DT, rewards_DT, torch.arange(len(pairs)).repeat_interleave(2))
    histories_DT, probabilities_HA = played.histories_DT, truth.probabilities_PHA[0]
    chances_P = probabilities_HA[histories_DT, classes_DT].prod(1).view(-1, 2).prod(1)
    advantages_DT = estimator(played, truth).double() / 2
    gradients_PHA = torch.zeros(len(pairs), *probabilities_HA.shape, dtype=torch.float64)
    pair_DT = played.groups_D[:, None].expand_as(classes_DT)
    gradients_PHA.index_put_((pair_DT, histories_DT, classes_DT), advantages_DT, accumulate=True)
    scores_DTA = advantages_DT[:, :, None] * probabilities_HA[histories_DT]
    gradients_PHA.index_put_((pair_DT, histories_DT), -scores_DTA, accumulate=True)
    mean_HA = (chances_P[:, None, None] * gradients_PHA).sum(0)
    return mean_HA, float((chances_P * (gradients_PHA - mean_HA).square().sum((1, 2))).sum())


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize(
    "name",
    ["leave_one_out", "per_turn", "critic, decay 1", "critic of the games, decay 1", "exact values, decay 1"],
)
def test_baselines_leave_the_mean_gradient_unchanged(kind: str, name: str) -> None:
    mean_HA, _ = moments_of(name, kind)
    assert torch.allclose(mean_HA, NUM_PROBLEMS * truth_of(kind).gradient_PHA[0], atol=1e-6)


@pytest.mark.parametrize("kind", REWARDS)
def test_a_critic_lowers_the_variance_of_the_gradient(kind: str) -> None:
    variances = {name: moments_of(name, kind)[1] for name in ESTIMATORS}
    for critic in ("critic, decay 1", "critic of the games, decay 1"):
        assert variances[critic] < 0.85 * min(variances["leave_one_out"], variances["per_turn"])
