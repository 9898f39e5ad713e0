"""From the rewards of turns and groups to the advantages of tokens, on figures that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tinker import types
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

from objectives.batch import Batch
from tasks.advantages import Shape, TokenAdvantages, compute_token_advantages
from tasks.source import Trained
from tasks.trajectories import compute_critic_metrics, penalize_distance

PROMPT = types.ModelInput.from_ints([5])


def trajectory(*turns: tuple[int, float]) -> Trajectory:
    """Turns of so many tokens, each with its reward."""
    made = [
        Transition(PROMPT, TokensWithLogprobs([7] * num_tokens, [-1.0] * num_tokens), reward, index == len(turns) - 1)
        for index, (num_tokens, reward) in enumerate(turns)
    ]
    return Trajectory(transitions=made, final_ob=PROMPT)


def group(members: Sequence[Trajectory], final: Sequence[float]) -> TrajectoryGroup:
    return TrajectoryGroup(list(members), list(final), [{} for _ in members])


# Totals 3 and 1; and a group of one with 5.
GROUPS = [
    group([trajectory((2, 1.0), (1, 0.0)), trajectory((1, 0.0))], [2.0, 1.0]),
    group([trajectory((2, 0.0))], [5.0]),
]


def compute(**shape: float | str) -> TokenAdvantages:
    return compute_token_advantages(GROUPS, Shape(**shape))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ({"estimator": "group_mean"}, [1, 1, 1, -1, 0, 0]),
        ({"estimator": "leave_one_out"}, [2, 2, 2, -2, 0, 0]),
        # Returns 3, 3, 2 of rewards 0, 1, 2; the mean at the first token is 2.
        ({"estimator": "discounted"}, [1, 1, 0, -1, 0, 0]),
        # Returns 1, 2, 2 and 1; 2.5 and 5: the means at the first token are 1 and 2.5.
        ({"estimator": "discounted", "discount": 0.5}, [0, 1, 1, 0, 0, 2.5]),
        # A decay of 1 is the return less the expectation: 1 of the other, 3 of the other, 0 without another.
        ({"estimator": "gae", "decay": 1.0}, [2, 2, 1, -2, 5, 5]),
        # A decay of 0 is each token's surprise alone.
        ({"estimator": "gae", "decay": 0.0}, [0, 1, 1, -2, 0, 5]),
    ],
)
def test_advantages(shape: dict[str, float | str], wanted: list[float]) -> None:
    assert compute(**shape).advantages_T.tolist() == pytest.approx(wanted)


def test_what_was_expected_and_what_came() -> None:
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


def test_the_expectation_is_held_to_what_came() -> None:
    def metrics(values: list[float]) -> dict[str, float]:
        batch = batch_of([9.0, 1.0, 3.0], values)
        return compute_critic_metrics([Trained(batch, torch.zeros(3))])

    assert metrics([0.0, 1.0, 3.0]) == {"value_loss": 0, "explained_variance": 1}
    assert metrics([0.0, 2.0, 2.0]) == {"value_loss": 0.5, "explained_variance": 0}
    constant = batch_of([9.0, 2.0, 2.0], [0.0, 2.0, 2.0])
    assert compute_critic_metrics([Trained(constant, torch.zeros(3))]) == {"value_loss": 0}


def test_the_distance_from_the_reference_costs_what_is_above_its_mean() -> None:
    batch, mean = penalize_distance(batch_of([0.0] * 3, [0.0] * 3), torch.tensor([4.0, -2.0, -5.0]), 0.1)
    assert mean == 2  # of 1 and 3 nats
    assert batch.advantages_DT is not None
    assert batch.advantages_DT.tolist() == pytest.approx([0, 0.1, -0.1])
