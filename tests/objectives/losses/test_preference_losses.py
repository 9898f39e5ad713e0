"""Preference losses, compared with formulas in plain Python and with finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objectives import ObjectiveError
from objectives.losses import PairLogprobs, bradley_terry, dpo, ipo, kto, orpo, pair_logprobs, simpo

Pair = tuple[float, float, int, int]
logprob = st.floats(-40, -0.01)
pairs = st.lists(st.tuples(logprob, logprob, st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4)


def as_pairs(rows: list[Pair]) -> PairLogprobs:
    columns = torch.tensor(rows, dtype=torch.float64).T
    return PairLogprobs(columns[0], columns[1], columns[2], columns[3])


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def plain_dpo(c, r, rc, rr, beta):
    return -log_sigmoid(beta * ((c - rc) - (r - rr)))


def plain_ipo(c, r, rc, rr, beta):
    return ((c - rc) - (r - rr) - 0.5 / beta) ** 2


@given(pairs, st.integers(0, 99))
@pytest.mark.parametrize(("loss", "reference_loss"), [(dpo, plain_dpo), (ipo, plain_ipo)])
def test_reference_based_losses(loss, reference_loss, rows, seed):
    reference = torch.randn(2, len(rows), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    policy, frozen = as_pairs(rows), PairLogprobs(reference[0], reference[1], torch.ones(1), torch.ones(1))
    expected = [
        reference_loss(c, r, rc, rr, 0.3) for (c, r, _, _), (rc, rr) in zip(rows, reference.T.tolist(), strict=True)
    ]
    assert loss(policy, frozen, beta=0.3).tolist() == pytest.approx(expected, rel=1e-9)


def plain_simpo(c, r, n, m):
    return -log_sigmoid(2.5 * (c / n - r / m) - 0.7)


def plain_orpo(c, r, n, m):
    chosen, rejected = math.exp(c / n), math.exp(r / m)
    odds_ratio = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
    return -c / n - 0.4 * log_sigmoid(math.log(odds_ratio))


@given(pairs)
def test_reference_free_losses(rows):
    policy = as_pairs(rows)
    assert simpo(policy, beta=2.5, gamma=0.7).tolist() == pytest.approx([plain_simpo(*row) for row in rows], rel=1e-9)
    assert orpo(policy, weight=0.4).tolist() == pytest.approx([plain_orpo(*row) for row in rows], rel=1e-6)


@given(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=1, max_size=5), st.floats(-2, 5))
def test_kto(answers, divergence):
    def expected(log_ratio, desirable):
        z = max(0.0, divergence)
        sign, weight = (1, 1.5) if desirable else (-1, 0.5)
        return weight * (1 - 1 / (1 + math.exp(-sign * 0.3 * (log_ratio - z))))

    log_ratios, desirable = zip(*answers, strict=True)
    actual = kto(
        torch.tensor(log_ratios, dtype=torch.float64),
        torch.tensor(desirable),
        torch.tensor(divergence, dtype=torch.float64, requires_grad=True),
        beta=0.3,
        desirable_weight=1.5,
        undesirable_weight=0.5,
    )
    assert not actual.requires_grad
    assert actual.tolist() == pytest.approx([expected(*completion) for completion in answers], rel=1e-9)


@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=1, max_size=5))
def test_bradley_terry(scores):
    chosen, rejected = torch.tensor(scores, dtype=torch.float64).T
    assert bradley_terry(chosen, rejected).tolist() == pytest.approx([-log_sigmoid(a - b) for a, b in scores], rel=1e-9)


LENGTHS = torch.arange(1.0, 6.0, dtype=torch.float64)
REFERENCE = PairLogprobs(-LENGTHS, LENGTHS - 7, LENGTHS, LENGTHS)
DESIRABLE = torch.tensor([True, False, True, False, False])


@pytest.mark.parametrize(
    "loss",
    [
        lambda c, r: dpo(PairLogprobs(c, r, LENGTHS, LENGTHS), REFERENCE),
        lambda c, r: ipo(PairLogprobs(c, r, LENGTHS, LENGTHS), REFERENCE),
        lambda c, r: simpo(PairLogprobs(c, r, LENGTHS, LENGTHS.flip(0))),
        lambda c, r: orpo(PairLogprobs(c, r, LENGTHS, LENGTHS.flip(0))),
        lambda c, r: kto(c - r, DESIRABLE, torch.tensor(0.3)),
        bradley_terry,
    ],
)
def test_gradcheck(loss):
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = (-5 * torch.rand(5, generator=generator, dtype=torch.float64) - 0.1 for _ in range(2))
    assert torch.autograd.gradcheck(loss, (chosen.requires_grad_(), rejected.requires_grad_()))


def test_extreme_logprobs_give_finite_values():
    certain = PairLogprobs(*(torch.tensor([0.0, -900.0], requires_grad=True) for _ in range(2)), *torch.ones(2, 2))
    value = orpo(certain).sum() + simpo(certain).sum() + dpo(certain, certain).sum()
    gradient = torch.autograd.grad(value, [certain.chosen_P, certain.rejected_P])
    assert value.isfinite()
    assert all(bool(component.isfinite().all()) for component in gradient)


def test_pairs_of_a_packed_batch():
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0])
    mask = torch.tensor([False, True, True, False, True, True, True])
    actual = pair_logprobs(logprobs, mask, torch.tensor([0, 2, 4, 5, 7]))
    assert actual.chosen_P.tolist() == [-2, -5]
    assert actual.rejected_P.tolist() == [-3, -13]
    assert actual.chosen_mean_P.tolist() == [-2, -5]
    assert actual.rejected_mean_P.tolist() == [-3, -6.5]
    with pytest.raises(ObjectiveError, match=r"has 3 datums, 0 of them without a trained token"):
        pair_logprobs(logprobs, mask, torch.tensor([0, 2, 4, 7]))
    with pytest.raises(ObjectiveError, match=r"has 4 datums, 1 of them without a trained token"):
        pair_logprobs(logprobs, mask, torch.tensor([0, 1, 4, 5, 7]))
