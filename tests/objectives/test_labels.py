"""Labels reach the terms but not the service."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import make_batch

from objectives import Batch, ObjectiveError
from objectives.labels import NONE, find_pairs, get_label, read_labels, without_labels
from tasks.training.datums import pack_datums


def datum(**labels: object) -> tinker.Datum:
    inputs = {"target_tokens": torch.tensor([1, 2]), "weights": torch.ones(2)}
    marked = {f"label:{name}": torch.tensor(value) for name, value in labels.items()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs={**inputs, **marked})


def labelled(**labels: list[int]) -> Batch:
    batch, _ = make_batch([2] * len(next(iter(labels.values()))))
    return replace(batch, labels_D={name: torch.tensor(values) for name, values in labels.items()})


def test_labels_are_read_and_removed_from_datums():
    data = [datum(pair=4, group=[1]), datum(group=0), datum(pair=4)]
    labels_D = read_labels(data)
    assert {name: labels.tolist() for name, labels in labels_D.items()} == {"group": [1, 0, NONE], "pair": [4, NONE, 4]}
    assert [set(without_labels(datum).loss_fn_inputs) for datum in data] == [{"target_tokens", "weights"}] * 3
    unlabelled = datum()
    assert read_labels([unlabelled]) == {}
    assert without_labels(unlabelled) is unlabelled


def test_packed_data_has_labels_and_sent_data_has_none():
    class Tokenizer:
        def decode(self, tokens: list[int]) -> str:
            return str(tokens)

    batch = pack_datums([datum(group=1), datum(group=0)], Tokenizer())
    assert {name: labels.tolist() for name, labels in batch.labels_D.items()} == {
        "prompt": [0, 0],  # both datums have the same model input
        "group": [1, 0],
    }
    assert [set(datum.loss_fn_inputs) for datum in batch.datums] == [{"target_tokens", "weights"}] * 2


@pytest.mark.parametrize("value", [[1, 2], 0.5])
def test_a_label_that_is_not_an_integer_raises(value):
    with pytest.raises(ObjectiveError, match=r"Datum 1 has .* under 'label:pair'; write a single integer"):
        read_labels([datum(pair=1), datum(pair=value)])


@given(st.permutations([0, 0, 1, 1, 2, 2, NONE, NONE, NONE]))
def test_pairs_are_the_two_datums_of_a_label_in_batch_order(labels):
    first_P, second_P = find_pairs(labelled(pair=labels), "pair")
    expected = [[d for d, label in enumerate(labels) if label == pair] for pair in (0, 1, 2)]
    assert torch.stack([first_P, second_P], -1).tolist() == expected


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"pair": [1, 1, 1]}, "must be on two datums of a batch, but this batch has the value 1 on 3"),
        ({"pair": [1, 1, 2]}, "has the value 2 on 1; put both datums of a pair into one batch"),
        ({"pair": [NONE, NONE]}, "has no such label"),
        ({"group": [1, 1]}, r"the data has no label 'pair' .labels: group.; write one integer"),
    ],
)
def test_invalid_pairs_raise(labels, message):
    with pytest.raises(ObjectiveError, match=message):
        find_pairs(labelled(**labels), "pair")


def test_a_pair_needs_trained_tokens():
    batch, _ = make_batch([1, 1, 1], masks=[True, False, True])
    batch = replace(batch, labels_D={"pair": torch.tensor([5, 5, NONE])})
    with pytest.raises(ObjectiveError, match="a datum of a pair 'pair' has no trained token"):
        find_pairs(batch, "pair")


def test_a_missing_label_raises():
    with pytest.raises(ObjectiveError, match=r"the data has no label 'group' .labels: none."):
        get_label(make_batch([1])[0], "group")
