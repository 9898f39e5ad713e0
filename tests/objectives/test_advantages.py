"""Advantages, compared with their definitions as plain sums."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objectives.advantages import centre_by_group, compute_gae, discounted_returns, leave_one_out

groups = st.lists(st.tuples(st.floats(-5, 5), st.sampled_from([-1, 3, 8])), min_size=1, max_size=9)


def columns(answers: list[tuple[float, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    rewards, labels = zip(*answers, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(labels)


def plain_centred(answers, scale):
    actual = []
    for reward, label in answers:
        group = [r for r, other in answers if other == label]
        mean = sum(group) / len(group)
        variance = sum((r - mean) ** 2 for r in group) / max(1, len(group) - 1)
        actual.append((reward - mean) / (math.sqrt(variance) + 1e-4 if scale else 1))
    return actual


def plain_leave_one_out(answers):
    actual = []
    for index, (reward, label) in enumerate(answers):
        others = [r for i, (r, other) in enumerate(answers) if other == label and i != index]
        actual.append(reward - sum(others) / len(others) if others else 0.0)
    return actual


@given(groups, st.booleans())
def test_groups(answers, scale):
    rewards, labels = columns(answers)
    actual = centre_by_group(rewards, labels, scale=scale)
    assert actual.tolist() == pytest.approx(plain_centred(answers, scale), rel=1e-6, abs=1e-9)
    assert leave_one_out(rewards, labels).tolist() == pytest.approx(plain_leave_one_out(answers), abs=1e-9)


@given(st.floats(-5, 5, width=32), st.integers(2, 16), st.booleans())
def test_equal_rewards_have_no_advantages_not_even_rounding(reward, size, scale):
    rewards, labels = torch.full((size,), reward), torch.zeros(size, dtype=torch.int64)
    assert not centre_by_group(rewards, labels, scale=scale).any()
    assert not leave_one_out(rewards, labels).any()


@given(groups)
def test_properties_of_every_group(answers):
    rewards, labels = columns(answers)
    shifted = rewards + labels  # a reward that all of a group share is no advantage
    torch.testing.assert_close(centre_by_group(shifted, labels), centre_by_group(rewards, labels))
    centred, left_out = centre_by_group(rewards, labels), leave_one_out(rewards, labels)
    for label in labels.unique():
        mine = labels == label
        n = int(mine.sum())
        assert float(centred[mine].sum()) == pytest.approx(0, abs=1e-9)
        torch.testing.assert_close(left_out[mine] * (n - 1), centred[mine] * n)


@st.composite
def trajectories(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards, values, a mask and offsets, including empty datums and datums without sampled tokens."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    rewards, values = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    mask = torch.rand(sum(lengths), generator=generator) < 0.7
    return rewards, values, mask, torch.tensor([0, *lengths]).cumsum(0)


def plain_gae(rewards, values, discount, decay):
    """Reference: sum over all later TD errors, for the sampled tokens of one datum."""
    following = [*values, 0.0][1:]
    surprise = [r + discount * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    count = len(rewards)
    return [sum((discount * decay) ** (k - t) * surprise[k] for k in range(t, count)) for t in range(count)]


factor = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@given(trajectories(), factor, factor)
def test_gae_and_returns_match_their_sums(case, discount, decay):
    rewards, values, mask, offsets = case
    gae = compute_gae(rewards, values, mask, offsets, discount=discount, decay=decay)
    returns = discounted_returns(rewards, mask, offsets, discount=discount)
    assert not gae[~mask].any()
    assert not returns[~mask].any()
    for start, end in pairwise(offsets.tolist()):
        mine = mask[start:end]
        r, v = rewards[start:end][mine].tolist(), values[start:end][mine].tolist()
        assert gae[start:end][mine].tolist() == pytest.approx(plain_gae(r, v, discount, decay))
        assert returns[start:end][mine].tolist() == pytest.approx(plain_gae(r, [0.0] * len(r), discount, 1))


@given(trajectories(), factor)
def test_gae_without_decay_is_the_return_minus_the_value(case, discount):
    rewards, values, mask, offsets = case
    gae = compute_gae(rewards, values, mask, offsets, discount=discount, decay=1.0)
    returns = discounted_returns(rewards, mask, offsets, discount=discount)
    torch.testing.assert_close(gae, (returns - values).where(mask, 0.0))


def test_a_perfect_critic_gives_zero_advantages():
    rewards, mask = torch.tensor([0.0, 1.0, 9.0, 2.0]), torch.tensor([True, True, False, True])
    offsets = torch.tensor([0, 4])
    values = discounted_returns(rewards, mask, offsets, discount=0.5)
    assert not compute_gae(rewards, values, mask, offsets, discount=0.5).any()
