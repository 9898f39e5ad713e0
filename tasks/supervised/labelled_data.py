"""Supervised data whose rows have labels for the terms: groups, constraints and the like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import chz
import datasets
import tinker
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised.data import SupervisedDatasetFromHFDataset, conversation_to_datum
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset

from objectives.labels import with_labels
from tasks.common.jsonl import parse_rows


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """Row of the data.

    Attributes:
        prompt: message of the user.
        completions: answers of the assistant, trained alike; terms compare their scores.
        labels: labels of all completions by name: integers for `Batch.labels_D`, texts for `Batch.text_labels_D`.
    """

    prompt: str
    completions: tuple[str, ...]
    labels: Mapping[str, int | str]


@chz.chz
class LabelledBuilder(ChatDatasetBuilder):
    """Rows of a JSONL file with a `prompt`, `completions` and `labels`; only the completions have loss.

    A batch has all completions of `batch_size` prompts.

    Attributes:
        path: JSONL file, with rows such as
            ``{"prompt": "2+2?", "completions": ["4", "5"], "labels": {"group": 0, "constraints": "(assert ...)"}}``.
        test_path: held-out JSONL file in the same format; None for no held-out data.
    """

    path: str
    test_path: str | None = None

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        return self._dataset(self.path), self._dataset(self.test_path) if self.test_path else None

    def _dataset(self, path: str) -> SupervisedDataset:
        rows = parse_rows(path, parse_labelled_row, "prompt, completions and labels")
        # Rows are numbered, because a dataset's columns have one type each.
        numbers = datasets.Dataset.from_dict({"row": list(range(len(rows)))})
        return SupervisedDatasetFromHFDataset(
            numbers, self.common_config.batch_size, flatmap_fn=lambda number: self._datums(rows[number["row"]])
        )

    def _datums(self, row: LabelledRow) -> list[tinker.Datum]:
        datums = (
            conversation_to_datum(
                [{"role": "user", "content": row.prompt}, {"role": "assistant", "content": completion}],
                self.renderer,
                self.common_config.max_length,
                self.common_config.train_on_what or TrainOnWhat.LAST_ASSISTANT_MESSAGE,
            )
            for completion in row.completions
        )
        return [with_labels(datum, row.labels) for datum in datums]


def parse_labelled_row(row: Mapping[str, Any]) -> LabelledRow:
    """Parse the JSON object of a row.

    Raises:
        TypeError, KeyError, ValueError: a field is missing or of another type.

    >>> parse_labelled_row({"prompt": "2+2?", "completions": ["4"], "labels": {"group": 0}})
    LabelledRow(prompt='2+2?', completions=('4',), labels={'group': 0})
    """
    prompt, completions, labels = row["prompt"], row["completions"], row["labels"]
    if not isinstance(prompt, str):
        raise TypeError(f"prompt is {prompt!r}; write a text")
    if not isinstance(completions, list) or not completions or not all(isinstance(text, str) for text in completions):
        raise TypeError(f"completions is {completions!r}; write a list of texts")
    if not isinstance(labels, dict) or not all(type(label) in (int, str) for label in labels.values()):
        raise TypeError(f"labels is {labels!r}; write integers or texts by name")
    return LabelledRow(prompt, tuple(completions), labels)
