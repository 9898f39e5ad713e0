"""Labels from the data to the terms, and never to the service."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import make_batch

from objectives import Batch, ObjectiveError
from objectives.labels import NONE, label_of, pairs_of, read_labels, without_labels
from tasks.data import pack_datums


def datum(**labels: object) -> tinker.Datum:
    inputs = {"target_tokens": torch.tensor([1, 2]), "weights": torch.ones(2)}
    marked = {f"label:{name}": torch.tensor(value) for name, value in labels.items()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs={**inputs, **marked})


def labelled(**labels: list[int]) -> Batch:
    batch, _ = make_batch([2] * len(next(iter(labels.values()))))
    return replace(batch, labels_D={name: torch.tensor(each) for name, each in labels.items()})


def test_labels_are_read_off_the_datums_and_taken_off_them():
    data = [datum(pair=4, group=[1]), datum(group=0), datum(pair=4)]
    labels_D = read_labels(data)
    assert {name: each.tolist() for name, each in labels_D.items()} == {"group": [1, 0, NONE], "pair": [4, NONE, 4]}
    assert [set(without_labels(each).loss_fn_inputs) for each in data] == [{"target_tokens", "weights"}] * 3
    plain = datum()
    assert read_labels([plain]) == {}
    assert without_labels(plain) is plain


def test_the_data_of_a_run_is_packed_with_its_labels_and_sent_without():
    class Tokenizer:
        def decode(self, tokens: list[int]) -> str:
            return str(tokens)

    batch = pack_datums([datum(group=1), datum(group=0)], Tokenizer())
    assert {name: each.tolist() for name, each in batch.labels_D.items()} == {"group": [1, 0]}
    assert [set(each.loss_fn_inputs) for each in batch.datums] == [{"target_tokens", "weights"}] * 2


@pytest.mark.parametrize("value", [[1, 2], 0.5])
def test_a_label_that_is_no_whole_number_is_named(value):
    with pytest.raises(ObjectiveError, match=r"Datum 1 has .* under 'label:pair' where one whole number is expected"):
        read_labels([datum(pair=1), datum(pair=value)])


@given(st.permutations([0, 0, 1, 1, 2, 2, NONE, NONE, NONE]))
def test_pairs_are_the_two_datums_of_a_label_in_their_order(labels):
    first_P, second_P = pairs_of(labelled(pair=labels), "pair")
    expected = [[d for d, label in enumerate(labels) if label == pair] for pair in (0, 1, 2)]
    assert torch.stack([first_P, second_P], -1).tolist() == expected


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({"pair": [1, 1, 1]}, "marks two datums, and this batch has 1 on 3:"),
        ({"pair": [1, 1, 2]}, "has 2 on 1: let the dataset put both datums of a pair into one batch"),
        ({"pair": [NONE, NONE]}, "has no label"),
        ({"group": [1, 1]}, "reads the label 'pair' of each datum, and the data has group: let the dataset write"),
    ],
)
def test_wrong_pairs_are_told_what_is_wrong(labels, says):
    with pytest.raises(ObjectiveError, match=says):
        pairs_of(labelled(**labels), "pair")


def test_a_datum_of_a_pair_has_to_train():
    batch, _ = make_batch([1, 1, 1], masks=[True, False, True])
    batch = replace(batch, labels_D={"pair": torch.tensor([5, 5, NONE])})
    with pytest.raises(ObjectiveError, match="a datum of a pair 'pair' has no trained token"):
        pairs_of(batch, "pair")


def test_a_batch_without_labels_says_none():
    with pytest.raises(ObjectiveError, match="and the data has none"):
        label_of(make_batch([1])[0], "group")
