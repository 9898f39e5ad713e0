"""Labels of datums: which pair or which group each of them belongs to, from the data to the terms.

A dataset writes them into ``loss_fn_inputs`` of its datums, one whole number under ``label:<name>``. They are read into
`Batch.labels_D` and taken off the datums, so that a service never sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from objectives.batch import Batch
from objectives.errors import ObjectiveError
from objectives.reductions import trained_datums

PREFIX = "label:"
# Of a datum that belongs to no pair and to no group.
NONE = -1


class Pairs(NamedTuple):
    """The datums of ``P`` pairs, int64 ``(P,)`` each, the two of a pair in the order of the batch."""

    first_P: Tensor
    second_P: Tensor


def read_labels(datums: Sequence[Any]) -> dict[str, Tensor]:
    """The labels of the service's datums, int64 ``(D,)`` by name; a datum without one has `NONE`.

    Raises:
        ObjectiveError: a label is not one whole number.
    """
    keys = sorted({key for datum in datums for key in datum.loss_fn_inputs if key.startswith(PREFIX)})
    return {
        key.removeprefix(PREFIX): torch.tensor([_read(index, datum, key) for index, datum in enumerate(datums)])
        for key in keys
    }


def without_labels(datum: Any) -> Any:
    """The datum as the service takes it."""
    kept = {key: value for key, value in datum.loss_fn_inputs.items() if not key.startswith(PREFIX)}
    return datum if len(kept) == len(datum.loss_fn_inputs) else replace(datum, loss_fn_inputs=kept)


def label_of(batch: Batch, name: str) -> Tensor:
    """The label of each datum, int64 ``(D,)``.

    Raises:
        ObjectiveError: the data has no such label.
    """
    if name not in batch.labels_D:
        raise ObjectiveError(
            f"it reads the label {name!r} of each datum, and the data has {', '.join(batch.labels_D) or 'none'}: let "
            f"the dataset write one whole number under {PREFIX + name!r} into the loss_fn_inputs of its datums"
        )
    return batch.labels_D[name]


def pairs_of(batch: Batch, name: str) -> Pairs:
    """The datums that share a label, two and two.

    Raises:
        ObjectiveError: no pair, a label that does not occur twice, or a datum of a pair that trains nothing.

    >>> labels_D = {"pair": torch.tensor([7, 3, NONE, 3, 7])}
    >>> pairs_of(Batch(torch.zeros(5).long(), torch.ones(5), torch.arange(6), labels_D=labels_D), "pair")
    Pairs(first_P=tensor([1, 0]), second_P=tensor([3, 4]))
    """
    label_D = label_of(batch, name)
    paired = (label_D != NONE).nonzero()[:, 0]
    labels, counts = label_D[paired].unique(return_counts=True)
    if len(labels) == 0 or bool((counts != 2).any()):
        marked = zip(labels.tolist(), counts.tolist(), strict=True)
        wrong = ", ".join(f"{label} on {count}" for label, count in marked if count != 2)
        raise ObjectiveError(
            f"each label {name!r} of a batch marks two datums, and this batch has {wrong or 'no label'}: let the "
            f"dataset put both datums of a pair into one batch, and leave {NONE} to the datums without a partner"
        )
    if not bool(trained_datums(batch)[paired].all()):
        raise ObjectiveError(f"a datum of a pair {name!r} has no trained token: check `max_length` of the data")
    ordered = paired[label_D[paired].argsort(stable=True)]
    return Pairs(ordered[::2], ordered[1::2])


def better_first(batch: Batch) -> Pairs:
    """The pairs of the label ``pair``, the better one first.

    Which one that is the label ``desirable`` says, 1 of the better one and 0 of the other; where the data has no such
    label, the order in the batch.

    Raises:
        ObjectiveError: as `pairs_of` does; or a pair has two better ones, or none.

    >>> labels_D = {"pair": torch.tensor([3, 3]), "desirable": torch.tensor([0, 1])}
    >>> better_first(Batch(torch.zeros(2).long(), torch.ones(2), torch.arange(3), labels_D=labels_D))
    Pairs(first_P=tensor([1]), second_P=tensor([0]))
    """
    pairs = pairs_of(batch, "pair")
    if "desirable" not in batch.labels_D:
        return pairs
    first_P, second_P = (batch.labels_D["desirable"][each_P] for each_P in pairs)
    if not bool(((first_P + second_P == 1) & (first_P * second_P == 0)).all()):
        raise ObjectiveError(
            "each pair has one answer with the label 'desirable' 1 and one with 0, and a pair of this batch has not: "
            "let the dataset say which answer is the better one, and leave out ties"
        )
    return Pairs(torch.where(first_P == 1, *pairs), torch.where(first_P == 1, pairs.second_P, pairs.first_P))


def _read(index: int, datum: Any, key: str) -> int:
    if key not in datum.loss_fn_inputs:
        return NONE
    value = datum.loss_fn_inputs[key].to_torch().reshape(-1).tolist()
    if len(value) != 1 or value[0] != int(value[0]):
        raise ObjectiveError(
            f"Datum {index} has {value} under {key!r} where one whole number is expected: number the pairs or groups."
        )
    return int(value[0])
