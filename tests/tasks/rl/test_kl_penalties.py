"""KL penalties and measures against tinker-cookbook's functions on the same random trajectories."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from random_groups import RandomScores, advantages_of, cookbook_data, packed, random_groups, reference_of
from tinker_cookbook.distillation.train_on_policy import incorporate_kl_penalty as cookbook_teacher_penalty
from tinker_cookbook.rl.metrics import compute_post_kl as cookbook_post_kl
from tinker_cookbook.rl.metrics import incorporate_kl_penalty
from tinker_cookbook.rl.types import Trajectory

from tasks.distillation.on_policy import TeacherTargets, add_teacher_advantages
from tasks.rl.trajectories import apply_kl_penalty, compute_post_kl
from tasks.training.batch_source import TrainedBatch


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.9, 1.0])
def test_penalty_equals_the_cookbooks(discount: float) -> None:
    groups = random_groups()
    data = cookbook_data(groups)
    expected = asyncio.run(incorporate_kl_penalty(data, cast(Any, RandomScores()), 0.3, discount))
    before = packed(groups)
    batch, mean = apply_kl_penalty(before, reference_of(before), 0.3, discount)
    assert before.advantages_DT is not None
    assert batch.advantages_DT is not None
    torch.testing.assert_close(batch.advantages_DT[batch.mask_DT], advantages_of(data))
    assert mean == pytest.approx(expected["kl_policy_base"], rel=1e-5)
    assert not bool(batch.advantages_DT[~batch.mask_DT].any())
    plain, _ = apply_kl_penalty(before, reference_of(before), 0.3)
    assert plain.advantages_DT is not None
    assert torch.equal(plain.advantages_DT, batch.advantages_DT) == (discount == 0)


def test_post_kl_equals_the_cookbooks() -> None:
    """The samples of a step are in two minibatches of unequal size; the cookbook has one list of all."""
    groups = random_groups(seed=1)
    expected = asyncio.run(cookbook_post_kl(cookbook_data(groups), cast(Any, RandomScores())))
    batches = [packed(groups[:1]), packed(groups[1:])]
    trained = [TrainedBatch(batch, torch.zeros(batch.num_tokens)) for batch in batches]
    actual = compute_post_kl(trained, [reference_of(batch) for batch in batches])
    assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rewards", [False, True])
@pytest.mark.parametrize("coefficient", [0.3, 1.0])
@pytest.mark.parametrize("discount", [0.0, 0.9])
def test_advantages_of_a_teacher_equal_the_cookbooks(coefficient: float, discount: float, rewards: bool) -> None:
    groups = random_groups(seed=2)
    if not rewards:  # equal rewards in a group have the advantage 0
        groups = [
            replace(group, final_rewards_G=[-sum_of(member) for member in group.trajectories_G]) for group in groups
        ]
    data = cookbook_data(groups)
    scores = [cast(Any, RandomScores())] * len(data)
    asyncio.run(cookbook_teacher_penalty(data, scores, [0] * len(data), coefficient, discount))
    batch = packed(random_groups(seed=2))
    assert batch.sampling_logprobs_DT is not None
    gap_DT = torch.where(batch.mask_DT, reference_of(batch) - batch.sampling_logprobs_DT, 0.0)
    targets = TeacherTargets(coefficient, discount, train_on_rewards=rewards)
    advantages_DT = add_teacher_advantages(batch, gap_DT, targets)
    torch.testing.assert_close(advantages_DT[batch.mask_DT], advantages_of(data), atol=1e-6, rtol=1e-5)
    assert not bool(advantages_DT[~batch.mask_DT].any())


def sum_of(trajectory: Trajectory) -> float:
    return sum(turn.reward for turn in trajectory.transitions)
