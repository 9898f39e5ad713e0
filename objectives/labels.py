"""Labels of datums: the pair or group that a datum belongs to, and texts such as the constraints of its answer.

A dataset adds labels to its datums with `with_labels`, which writes them into their ``loss_fn_inputs``: one integer
under ``label:<name>``, or the bytes of a text under ``text:<name>``. `read_labels` and `read_text_labels` read them for
`Batch.labels_D` and `Batch.text_labels_D`, and `without_labels` removes them before the datums are sent to a service.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from objectives.batch import Batch, unpack
from objectives.config.aliases import renamed_attribute
from objectives.errors import ObjectiveError
from objectives.reductions import trained_datums
from objectives.sdk.protocols import Datum, DatumT

PREFIX, TEXT_PREFIX = "label:", "text:"
# Label of a datum that belongs to no pair and no group.
NONE = -1
# Labels that flows write: the number of the datum's prompt, and that of its completion among the samples of the prompt.
PROMPT, MEMBER = "prompt", "member"

__getattr__ = partial(renamed_attribute, __name__)  # names of release 0.1


class Pairs(NamedTuple):
    """Indices of the two datums of ``P`` pairs, int64 ``(P,)`` each."""

    first_P: Tensor
    second_P: Tensor


def read_labels(datums: Sequence[Datum]) -> dict[str, Tensor]:
    """Read the labels of the service's datums, int64 ``(D,)`` by name; `NONE` for datums without the label.

    Raises:
        ObjectiveError: a label is not a single integer.
    """
    keys = sorted({key for datum in datums for key in datum.loss_fn_inputs if key.startswith(PREFIX)})
    return {
        key.removeprefix(PREFIX): torch.tensor([_read(index, datum, key) for index, datum in enumerate(datums)])
        for key in keys
    }


def with_labels(datum: DatumT, labels: Mapping[str, int | str]) -> DatumT:
    """Return the datum with labels: integers as ``label:<name>``, texts as ``text:<name>`` in UTF-8 bytes.

    >>> import tinker
    >>> datum = with_labels(tinker.Datum(tinker.ModelInput.from_ints([1])), {"group": 2, "rule": "x=1"})
    >>> {name: values.data for name, values in datum.loss_fn_inputs.items()}
    {'label:group': [2], 'text:rule': [120, 61, 49]}
    """
    inputs = {
        (TEXT_PREFIX if isinstance(label, str) else PREFIX) + name: torch.tensor(
            list(label.encode()) if isinstance(label, str) else [label], dtype=torch.int64
        )
        for name, label in labels.items()
    }
    return replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, **inputs})


def read_text_labels(datums: Sequence[Datum]) -> dict[str, tuple[str, ...]]:
    """Read the text labels of the service's datums, ``D`` strings by name; empty for datums without the label.

    Raises:
        ObjectiveError: a label is not a text that `with_labels` encoded.
    """
    keys = sorted({key for datum in datums for key in datum.loss_fn_inputs if key.startswith(TEXT_PREFIX)})
    return {
        key.removeprefix(TEXT_PREFIX): tuple(_read_text(index, datum, key) for index, datum in enumerate(datums))
        for key in keys
    }


def without_labels(datum: DatumT) -> DatumT:
    """Return the datum without its labels, as the service accepts it."""
    prefixes = (PREFIX, TEXT_PREFIX)
    inputs = {key: value for key, value in datum.loss_fn_inputs.items() if not key.startswith(prefixes)}
    return datum if len(inputs) == len(datum.loss_fn_inputs) else replace(datum, loss_fn_inputs=inputs)


def get_label(batch: Batch, name: str) -> Tensor:
    """Return the label of each datum, int64 ``(D,)``.

    Raises:
        ObjectiveError: no datum has this label.
    """
    if name not in batch.labels_D:
        raise ObjectiveError(
            f"the data has no label {name!r} (labels: {', '.join(batch.labels_D) or 'none'}); write one integer under "
            f"{PREFIX + name!r} into the loss_fn_inputs of each datum"
        )
    return batch.labels_D[name]


def get_text_label(batch: Batch, name: str) -> tuple[str, ...]:
    """Return the text label of each datum, ``D`` strings; empty for datums without it.

    Raises:
        ObjectiveError: no datum has this label.
    """
    if name not in batch.text_labels_D:
        raise ObjectiveError(
            f"the data has no text label {name!r} (text labels: {', '.join(batch.text_labels_D) or 'none'}); add it to "
            "each datum with with_labels"
        )
    return batch.text_labels_D[name]


def number_prompts(batch: Batch) -> Tensor:
    """Return the number of each datum's prompt, from 0, int64 ``(D,)``; datums with the same prompt share a number.

    The numbers rank the values of the label ``prompt``, which every batch of the service's datums has (`find_prompts`).
    Without this label, the prompt of a datum is its targets before the first trained one.

    >>> batch = Batch(torch.tensor([7, 1, 8, 1, 7, 2]), torch.tensor([0.0, 1, 0, 1, 0, 1]), torch.tensor([0, 2, 4, 6]))
    >>> number_prompts(batch)
    tensor([0, 1, 0])
    """
    if PROMPT in batch.labels_D:
        return batch.labels_D[PROMPT].unique(return_inverse=True)[1]
    targets_D, masks_D = unpack(batch.target_tokens_DT, batch.offsets_D), unpack(batch.mask_DT, batch.offsets_D)
    prompts = [
        tuple(targets[: int(mask.int().argmax())].flatten().tolist()) if bool(mask.any()) else None
        for targets, mask in zip(targets_D, masks_D, strict=True)
    ]
    return number_equal(prompts)


def find_prompts(datums: Sequence[Datum], weights_D: Sequence[Tensor]) -> Tensor:
    """Number the prompts of the service's datums from 0 by their tokens, int64 ``(D,)``, for the label ``prompt``.

    The prompt is the model input before the first trained target, including images and the first token, which is no
    target.

    Args:
        weights_D: weights of each datum's targets, ``(T,)`` or ``(T, K)``.
    """
    prompts: list[Hashable] = []
    for datum, weights in zip(datums, weights_D, strict=True):
        chunks = datum.model_input.chunks
        others = tuple(repr(chunk) for chunk in chunks if not hasattr(chunk, "tokens"))
        start = tuple(getattr(chunks[0], "tokens", ()))[:1]
        first = int((weights != 0).reshape(len(weights), -1).any(-1).int().argmax())
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()[:first]
        prompts.append((others, start, tuple(targets.flatten().tolist())))
    return number_equal(prompts)


def number_equal(keys: Sequence[Hashable]) -> Tensor:
    """Number equal keys with equal integers from 0, in order of their first occurrence, int64.

    >>> number_equal(["b", "a", "b"])
    tensor([0, 1, 0])
    """
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])


def find_pairs(batch: Batch, name: str) -> Pairs:
    """Find the pairs of datums that share a label; the first datum of a pair comes first in the batch.

    Raises:
        ObjectiveError: no datum has the label, a value of the label is not on exactly two datums, or a datum of a pair
            has no trained token.

    >>> labels_D = {"pair": torch.tensor([7, 3, NONE, 3, 7])}
    >>> find_pairs(Batch(torch.zeros(5).long(), torch.ones(5), torch.arange(6), labels_D=labels_D), "pair")
    Pairs(first_P=tensor([1, 0]), second_P=tensor([3, 4]))
    """
    label_D = get_label(batch, name)
    paired = (label_D != NONE).nonzero()[:, 0]
    labels, counts = label_D[paired].unique(return_counts=True)
    if len(labels) == 0 or bool((counts != 2).any()):
        label_counts = zip(labels.tolist(), counts.tolist(), strict=True)
        wrong = ", ".join(f"the value {label} on {count}" for label, count in label_counts if count != 2)
        raise ObjectiveError(
            f"each value of the label {name!r} must be on two datums of a batch, but this batch has "
            f"{wrong or 'no such label'}; put both datums of a pair into one batch, and set {NONE} for datums without "
            "a partner"
        )
    if not bool(trained_datums(batch)[paired].all()):
        raise ObjectiveError(f"a datum of a pair {name!r} has no trained token; check `max_length` of the data")
    ordered = paired[label_D[paired].argsort(stable=True)]
    return Pairs(ordered[::2], ordered[1::2])


def find_preference_pairs(batch: Batch) -> Pairs:
    """Find the pairs of the label ``pair``, the chosen datum first.

    The label ``desirable`` is 1 for the chosen and 0 for the rejected datum. Without this label, the chosen datum is
    the first in the batch.

    Raises:
        ObjectiveError: see `find_pairs`; or a pair does not have exactly one desirable datum.

    >>> labels_D = {"pair": torch.tensor([3, 3]), "desirable": torch.tensor([0, 1])}
    >>> find_preference_pairs(Batch(torch.zeros(2).long(), torch.ones(2), torch.arange(3), labels_D=labels_D))
    Pairs(first_P=tensor([1]), second_P=tensor([0]))
    """
    pairs = find_pairs(batch, "pair")
    if "desirable" not in batch.labels_D:
        return pairs
    first_P, second_P = (batch.labels_D["desirable"][datum_P] for datum_P in pairs)
    if not bool(((first_P + second_P == 1) & (first_P * second_P == 0)).all()):
        raise ObjectiveError(
            "each pair must have one datum with the label 'desirable' 1 and one with 0, but a pair of this batch does "
            "not; set both labels, and remove ties"
        )
    return Pairs(torch.where(first_P == 1, *pairs), torch.where(first_P == 1, pairs.second_P, pairs.first_P))


def _read(index: int, datum: Datum, key: str) -> int:
    if key not in datum.loss_fn_inputs:
        return NONE
    value = datum.loss_fn_inputs[key].to_torch().reshape(-1).tolist()
    if len(value) != 1 or value[0] != int(value[0]):
        raise ObjectiveError(
            f"Datum {index} has {value} under {key!r}; write a single integer, the number of its pair or group."
        )
    return int(value[0])


def _read_text(index: int, datum: Datum, key: str) -> str:
    if key not in datum.loss_fn_inputs:
        return ""
    values = datum.loss_fn_inputs[key].to_torch().reshape(-1).tolist()
    try:
        return bytes(values).decode()
    except (TypeError, ValueError) as error:
        raise ObjectiveError(
            f"Datum {index} has no UTF-8 text under {key!r} ({error}); add it with with_labels."
        ) from error
