"""Gradients and extreme values of preference losses; `test_preferences_of_trl` compares their values with TRL."""

from __future__ import annotations

import pytest
import torch

from objectives import ObjectiveError
from objectives.losses import PairLogprobs, bradley_terry, dpo, ipo, kto, orpo, pair_logprobs, simpo

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
