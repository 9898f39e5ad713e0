from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import make_batch, ragged

from objectives import ObjectiveError, pack, unpack
from objectives.losses import compute_mean_nll, cross_entropy


@given(st.lists(st.lists(st.floats(-9, 9, width=32), max_size=5), min_size=1, max_size=5))
def test_unpack_inverts_pack(rows):
    fields = [torch.tensor(row) for row in rows]
    flat_DT, offsets_D = pack(fields)
    assert len(offsets_D) == len(rows) + 1
    assert [field.tolist() for field in unpack(flat_DT, offsets_D)] == [field.tolist() for field in fields]


@given(ragged())
def test_datum_of_each_token(case):
    batch, _ = case
    lengths = batch.offsets_D.diff().tolist()
    assert batch.datum_of_DT.tolist() == [d for d, length in enumerate(lengths) for _ in range(length)]
    assert (batch.num_datums, batch.num_tokens) == (len(lengths), sum(lengths))


@given(ragged())
def test_losses_equal_plain_loops(case):
    batch, outputs = case
    pairs = list(zip(outputs.logprobs_DT.tolist(), batch.weights_DT.tolist(), strict=True))
    expected = -sum(logprob * weight for logprob, weight in pairs)
    assert cross_entropy(outputs.logprobs_DT, batch.weights_DT).item() == pytest.approx(expected)
    mean = expected / sum(weight for _, weight in pairs)
    assert compute_mean_nll(outputs.logprobs_DT, batch.weights_DT) == pytest.approx(mean)


def test_cross_entropy_gradcheck():
    batch, outputs = make_batch([3, 1])
    logprobs_DT = outputs.logprobs_DT.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, batch.weights_DT.double()), logprobs_DT)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_an_empty_batch_raises(lengths):
    with pytest.raises(ObjectiveError, match=f"A batch has {len(lengths)} datums and 0 tokens"):
        make_batch(lengths)


def test_a_batch_without_trained_tokens_raises():
    with pytest.raises(ObjectiveError, match="No token of a batch has a non-zero weight"):
        make_batch([2], masks=[False, False])
