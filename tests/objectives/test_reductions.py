from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch
from hypothesis import given
from ragged_batches import datums, make_batch, ragged

from objectives.batch import Batch
from objectives.errors import ObjectiveError
from objectives.reductions import mean_by_datum, reduce, sum_by_datum, trained_datums


@given(ragged())
def test_sums_and_means_equal_plain_loops(case):
    batch, outputs = case
    values = datums(outputs.logprobs_DT, batch)
    assert sum_by_datum(outputs.logprobs_DT, batch).tolist() == pytest.approx([sum(row) for row in values])
    means = [fmean(row) if row else 0.0 for row in values]
    assert mean_by_datum(outputs.logprobs_DT, batch).tolist() == pytest.approx(means)
    assert trained_datums(batch).tolist() == [bool(row) for row in values]


@given(ragged())
def test_token_reductions_equal_plain_loops(case):
    batch, outputs = case
    values = datums(outputs.logprobs_DT, batch)
    flat = [value for row in values for value in row]
    expected = {
        "token_mean": fmean(flat),
        "sequence_mean": fmean(fmean(row) for row in values if row),
        "sum": sum(flat),
    }
    for reduction, value in expected.items():
        assert reduce(outputs.logprobs_DT, batch, reduction).item() == pytest.approx(value)


@pytest.mark.parametrize(("reduction", "expected"), [("token_mean", 2.0), ("sequence_mean", 2.0), ("sum", 4.0)])
def test_a_value_per_datum_is_averaged_over_trained_datums(reduction, expected):
    batch, _ = make_batch([2, 1, 3], masks=[True, True, False, True, False, False])
    assert reduce(torch.tensor([1.0, 100.0, 3.0]), batch, reduction).item() == expected


def test_untrained_tokens_may_have_any_value():
    batch, _ = make_batch([2], masks=[False, True])
    value = torch.tensor([math.nan, 3.0], requires_grad=True)
    total = reduce(value, batch, "token_mean")
    assert total.item() == 3.0
    assert torch.autograd.grad(total, value)[0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("shape", "reduction"), [((), "token_mean"), ((3,), "none"), ((4,), "sum"), ((3, 1), "token_mean")]
)
def test_other_shapes_raise(shape, reduction):
    batch, _ = make_batch([1, 2])
    with pytest.raises(ObjectiveError, match=r"shape \(.*\) with the reduction"):
        reduce(torch.zeros(shape), batch, reduction)


def test_values_for_each_of_several_targets_raise():
    batch = Batch(torch.zeros((3, 4)).long(), torch.ones((3, 4)), torch.tensor([0, 1, 3]))
    for reduce_values in (
        lambda: reduce(torch.zeros((3, 4)), batch, "sum"),
        lambda: sum_by_datum(torch.zeros((3, 4)), batch),
    ):
        with pytest.raises(ObjectiveError, match="the batch has 4 targets per position, but this term reads one"):
            reduce_values()
