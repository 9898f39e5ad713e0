"""Packing of supervised datums into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tinker
import torch
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from objectives.batch import Batch, pack_targets
from objectives.labels import PROMPT, find_prompts, read_labels, read_text_labels, without_labels


class Datums:
    """Datums of a batch for the service, in order. Not a list, because Prefect visits every token in a list."""

    __slots__ = ("_datums",)

    def __init__(self, datums: Sequence[tinker.Datum]) -> None:
        self._datums = tuple(datums)

    def __iter__(self) -> Iterator[tinker.Datum]:
        return iter(self._datums)


def pack_datums(datums: list[tinker.Datum], tokenizer: Tokenizer) -> Batch:
    """Pack supervised datums into a batch; the batch also contains the datums, without their labels.

    Args:
        datums: targets and weights of the shape `(T,)`, or `(T, K)` with K weighted targets per position, the same K
            for all of them.

    Raises:
        ConfigError: a datum lacks `target_tokens` or `weights`, has them in another shape, or has another number of
            them than of input tokens.
    """
    targets_D, weights_D = [], []
    for index, datum in enumerate(datums):
        missing = {"target_tokens", "weights"} - set(datum.loss_fn_inputs)
        if missing:
            raise ConfigError(
                f"Datum {index} of a batch has no {' and no '.join(sorted(missing))}, which supervised training needs: "
                "check the dataset builder."
            )
        targets, weights = (datum.loss_fn_inputs[key].to_torch() for key in ("target_tokens", "weights"))
        if targets.ndim not in (1, 2) or targets.shape != weights.shape:
            raise ConfigError(
                f"Datum {index} of a batch has target_tokens of shape {tuple(targets.shape)} and weights of shape "
                f"{tuple(weights.shape)}; both must be (T,) or (T, K): check the dataset builder."
            )
        if len(targets) != (num_inputs := datum.model_input.length):
            raise ConfigError(
                f"Datum {index} of a batch has {num_inputs} input tokens but {len(targets)} target_tokens: "
                "check that the dataset builder gives each input token one target."
            )
        if targets_D and targets.shape[1:] != targets_D[0].shape[1:]:
            raise ConfigError(
                f"Datum {index} of a batch has target_tokens of shape {tuple(targets.shape)}, and the first has "
                f"{tuple(targets_D[0].shape)}; give every position the same number of targets, with weight 0 for "
                "unused ones."
            )
        targets_D.append(targets.to(torch.int64))
        weights_D.append(weights.to(torch.float32))
    return pack_targets(
        targets_D,
        weights_D,
        tokenizer.decode,
        datums=Datums([without_labels(datum) for datum in datums]),
        labels_D={PROMPT: find_prompts(datums, weights_D), **read_labels(datums)},
        text_labels_D=read_text_labels(datums),
    )
