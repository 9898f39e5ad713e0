"""Token advantages from the rewards of turns and groups, on numbers that can be checked by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tinker import types
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

from objectives.batch import Batch
from tasks.rl.advantages import AdvantageSettings, TokenAdvantages, compute_token_advantages, has_no_advantages
from tasks.rl.rollouts.group_rollout import Group
from tasks.rl.trajectories import apply_kl_penalty, compute_critic_metrics, groups_to_pack
from tasks.training.batch_source import TrainedBatch

PROMPT = types.ModelInput.from_ints([5])


def trajectory(*turns: tuple[int, float]) -> Trajectory:
    """Trajectory of turns, each a number of tokens and a reward."""
    transitions = [
        Transition(PROMPT, TokensWithLogprobs([7] * num_tokens, [-1.0] * num_tokens), reward, index == len(turns) - 1)
        for index, (num_tokens, reward) in enumerate(turns)
    ]
    return Trajectory(transitions=transitions, final_ob=PROMPT)


def group(members: Sequence[Trajectory], final_rewards: Sequence[float]) -> TrajectoryGroup:
    return TrajectoryGroup(list(members), list(final_rewards), [{} for _ in members])


# A group with the total rewards 3 and 1, and a group of one member with 5.
GROUPS = [
    group([trajectory((2, 1.0), (1, 0.0)), trajectory((1, 0.0))], [2.0, 1.0]),
    group([trajectory((2, 0.0))], [5.0]),
]


def compute(**settings: float | str) -> TokenAdvantages:
    return compute_token_advantages(GROUPS, AdvantageSettings(**settings))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"estimator": "group_mean"}, [1, 1, 1, -1, 0, 0]),
        ({"estimator": "leave_one_out"}, [2, 2, 2, -2, 0, 0]),
        # Returns 3 and 2 of the two turns, and 1 of the other member, which has no second turn.
        ({"estimator": "per_turn"}, [2, 2, 2, -2, 0, 0]),
        # Returns 3, 3, 2 of rewards 0, 1, 2; the mean at the first token is 2.
        ({"estimator": "discounted"}, [1, 1, 0, -1, 0, 0]),
        # Returns 1, 2, 2 and 1 in the first group, 2.5 and 5 in the second; the means at the first token are 1 and 2.5.
        ({"estimator": "discounted", "discount": 0.5}, [0, 1, 1, 0, 0, 2.5]),
        # With decay 1, the return minus the value, which is the other member's total: 1, 3, and 0 in a group of one.
        ({"estimator": "gae", "decay": 1.0}, [2, 2, 1, -2, 5, 5]),
        # With decay 0, the temporal difference of each token alone.
        ({"estimator": "gae", "decay": 0.0}, [0, 1, 1, -2, 0, 5]),
    ],
)
def test_advantages(settings: dict[str, float | str], expected: list[float]) -> None:
    assert compute(**settings).advantages_T.tolist() == pytest.approx(expected)


def test_values_and_returns() -> None:
    tokens = compute()
    assert tokens.values_T.tolist() == [1, 1, 1, 3, 0, 0]
    assert tokens.returns_T.tolist() == [3, 3, 2, 1, 5, 5]


def batch_of(returns: list[float], values: list[float]) -> Batch:
    size = len(returns)
    return Batch(
        torch.zeros(size, dtype=torch.int64),
        torch.tensor([0.0] + [1.0] * (size - 1)),
        torch.tensor([0, size]),
        advantages_DT=torch.zeros(size),
        sampling_logprobs_DT=torch.tensor([0.0, -1.0, -2.0]),
        values_DT=torch.tensor(values),
        returns_DT=torch.tensor(returns),
    )


def test_critic_metrics_compare_values_with_returns() -> None:
    def metrics(values: list[float]) -> dict[str, float]:
        batch = batch_of([9.0, 1.0, 3.0], values)
        return compute_critic_metrics([TrainedBatch(batch, torch.zeros(3))])

    assert metrics([0.0, 1.0, 3.0]) == {"value_loss": 0, "explained_variance": 1}
    assert metrics([0.0, 2.0, 2.0]) == {"value_loss": 0.5, "explained_variance": 0}
    constant = batch_of([9.0, 2.0, 2.0], [0.0, 2.0, 2.0])
    assert compute_critic_metrics([TrainedBatch(constant, torch.zeros(3))]) == {"value_loss": 0}


def test_kl_penalty_subtracts_the_kl_above_its_mean() -> None:
    batch, mean = apply_kl_penalty(batch_of([0.0] * 3, [0.0] * 3), torch.tensor([4.0, -2.0, -5.0]), 0.1)
    assert mean == 2  # of 1 and 3 nats
    assert batch.advantages_DT is not None
    assert batch.advantages_DT.tolist() == pytest.approx([0, 0.1, -0.1])


@pytest.mark.parametrize("estimator", ["group_mean", "leave_one_out", "per_turn", "discounted", "gae"])
@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_groups_are_dropped_exactly_if_their_advantages_are_zero(estimator: str, discount: float) -> None:
    """Two members of one or two turns, with all lengths of 1 and 2 tokens and rewards of 0 and 1."""
    settings = AdvantageSettings(estimator, discount=discount, decay=0.8)
    turns = [(length, reward) for length in (1, 2) for reward in (0.0, 1.0)]
    members = [trajectory(first, *rest) for first in turns for rest in [(), *((second,) for second in turns)]]
    dropped: list[bool] = []
    for first in members:
        for second in members:
            pair = group([first, second], [0.0, 0.0])
            largest = compute_token_advantages([pair], settings).advantages_T.abs().max().item()
            dropped.append(has_no_advantages(pair, settings))
            assert dropped[-1] == (largest < 1e-5)
    assert any(dropped)
    assert not all(dropped)


def test_advantages_per_turn_of_members_without_a_turn() -> None:
    empty = group([Trajectory([], PROMPT), Trajectory([], PROMPT)], [1.0, 0.0])
    assert compute_token_advantages([empty], AdvantageSettings("per_turn")).advantages_T.tolist() == []


@pytest.mark.parametrize("estimator", ["group_mean", "leave_one_out", "per_turn", "discounted", "gae"])
def test_groups_without_sampled_tokens_have_no_advantages(estimator: str) -> None:
    """The prompt of such a group is longer than the limit of a trajectory."""
    empty = group([trajectory(), trajectory()], [1.0, 0.0])
    settings = AdvantageSettings(estimator=estimator)  # pyright: ignore[reportArgumentType]
    assert not len(compute_token_advantages([empty], settings).advantages_T)
    last = compute_token_advantages([GROUPS[0], empty], settings).advantages_T
    torch.testing.assert_close(last, compute_token_advantages([GROUPS[0]], settings).advantages_T)


def test_rewards_that_differ_by_rounding_teach_nothing() -> None:
    split = group([trajectory((1, 0.1), (1, 0.2)), trajectory((1, 0.3))], [0.0, 0.0])
    assert len(set(split.get_total_rewards())) == 2
    assert has_no_advantages(split, AdvantageSettings())
    small = group([trajectory((1, 1e-9)), trajectory((1, 2e-9))], [0.0, 0.0])
    assert not has_no_advantages(small, AdvantageSettings())


def test_a_group_with_tokens_is_kept_if_all_groups_are_constant() -> None:
    empty, constant = group([trajectory(), trajectory()], [1.0, 1.0]), group([trajectory((1, 1.0))] * 2, [0.0, 0.0])
    groups = [Group((), part, ()) for part in (empty, constant)]
    assert groups_to_pack(groups, None, AdvantageSettings(drop_constant=True)) == [1]
    assert groups_to_pack(groups, None, AdvantageSettings()) == [0, 1]
    assert groups_to_pack(groups[:1], None, AdvantageSettings(drop_constant=True)) == [0]
