"""KL penalties and measures against tinker-cookbook's functions on the same random trajectories."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from random_groups import Decoder, RandomScores, advantages_of, cookbook_data, packed, random_groups, reference_of
from tinker_cookbook.distillation.train_on_policy import incorporate_kl_penalty as cookbook_teacher_penalty
from tinker_cookbook.rl.metrics import compute_post_kl as cookbook_post_kl
from tinker_cookbook.rl.metrics import incorporate_kl_penalty
from tinker_cookbook.rl.types import Trajectory

from objectives.batch import Batch
from tasks.common.task import inline_tasks
from tasks.distillation.on_policy import TeacherTargets, add_teacher_advantages
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.rollout_source import MinibatchSettings, RolloutSettings, RolloutSource
from tasks.rl.rollouts.group_rollout import Group, RetryWholeGroup
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


@pytest.mark.parametrize("num_minibatches", [1, 3])
def test_penalties_of_a_step_with_several_parts_equal_the_cookbooks(num_minibatches: int) -> None:
    """The cookbook takes the mean over a step and then splits it into updates; a stream has the mean of a minibatch."""
    groups = random_groups(seed=3)
    streamed = [[group] for group in groups] if num_minibatches > 1 else [groups]
    expected = []
    for together in streamed:
        data = cookbook_data(together)
        asyncio.run(incorporate_kl_penalty(data, cast(Any, RandomScores()), 0.3, 0.9))
        expected.append(advantages_of(data))
    shape = AdvantageSettings(kl_coefficient=0.3, kl_discount_factor=0.9)
    settings = RolloutSettings(0, 8, 1.0, RetryWholeGroup(0), shape)
    minibatches = MinibatchSettings(3, num_substeps=3 // num_minibatches, num_minibatches=num_minibatches)
    with closing(RolloutSource(cast(Any, ThreeGroups()), None, cast(Any, Decoder()), settings, minibatches)) as source:
        source.reference = cast(Any, RandomReference())
        with inline_tasks():
            waits = [lambda group=group: [Group((), group, ())] for group in groups]
            batches = [pending.result() for pending in source.start_gathering(0, waits)]
    advantages = [batch.advantages_DT[batch.mask_DT] for batch in batches if batch.advantages_DT is not None]
    torch.testing.assert_close(torch.cat(advantages), torch.cat(expected))


@pytest.mark.parametrize("has_constant", [False, True])
def test_a_step_whose_rollouts_are_all_masked_gets_no_penalty(has_constant: bool) -> None:
    """A constant group is not truncated, but dropped."""
    groups = random_groups()
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories_G):
        trajectory.transitions[-1].ac.stop_reason = "length"
    if has_constant:
        complete = random_groups(seed=9)[0]
        groups[0] = replace(complete, final_rewards_G=[-sum_of(member) for member in complete.trajectories_G])
    shape = AdvantageSettings(kl_coefficient=0.3, drop_constant=has_constant)
    settings = RolloutSettings(0, 8, 1.0, RetryWholeGroup(0), shape, mask_truncated=True)
    with closing(
        RolloutSource(cast(Any, ThreeGroups()), None, cast(Any, Decoder()), settings, MinibatchSettings(3))
    ) as source:
        source.reference = cast(Any, RandomReference())
        with inline_tasks():
            (pending,) = source.start_gathering(0, [lambda: [Group((), group, ()) for group in groups]])
            batch = pending.result()
    assert batch.num_datums > 0
    assert batch.advantages_DT is not None
    assert not batch.advantages_DT.any()


class ThreeGroups:
    """Dataset of one batch of three groups."""

    def __len__(self) -> int:
        return 1

    def get_batch(self, index: int) -> list[None]:
        return [None] * 3


class RandomReference:
    """Reference with the logprobs of `RandomScores`."""

    def logprobs(self, batch: Batch, step: int) -> torch.Tensor:
        return reference_of(batch)


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
