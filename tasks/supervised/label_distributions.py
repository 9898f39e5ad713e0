"""Supervised data whose answers are distributions over labels: votes of annotators, odds, soft classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import chz
import datasets
import tinker
import torch
from tinker_cookbook.renderers import Message, TrainOnWhat
from tinker_cookbook.supervised.data import SupervisedDatasetFromHFDataset, conversation_to_datum
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset

from blocks.errors import ConfigError
from tasks.common.jsonl import parse_rows


@dataclass(frozen=True, slots=True)
class DistributionRow:
    """Prompt with the probability of each label as the answer; the probabilities sum to 1."""

    prompt: str
    distribution: Mapping[str, float]


@chz.chz
class LabelDistributionBuilder(ChatDatasetBuilder):
    """Rows of a JSONL file with a `prompt` and a `distribution` over labels, each a possible answer to the prompt.

    The datum of a row ends where the answer begins. Every position has the first tokens of all K labels of the files as
    its targets, ``(T, K)``. At the last position their weights are the probabilities of the labels, elsewhere 0.
    `cross_entropy` then trains the distribution, and terms whose names end in `_topk` read it.

    Attributes:
        path: JSONL file, with rows such as ``{"prompt": "Is it good? ...", "distribution": {"yes": 7, "no": 3}}``. The
            numbers are probabilities, votes or odds; they are divided by their sum. Labels that only other rows have
            get 0.
        test_path: held-out JSONL file in the same format; None for no held-out data.
    """

    path: str
    test_path: str | None = None

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        rows = _read(self.path)
        test_rows = _read(self.test_path) if self.test_path else []
        labels = sorted({label for row in (*rows, *test_rows) for label in row.distribution})
        return self._dataset(rows, labels), self._dataset(test_rows, labels) if test_rows else None

    def _dataset(self, rows: Sequence[DistributionRow], labels: Sequence[str]) -> SupervisedDataset:
        # The dataset holds numbers of rows, because its columns cannot hold dicts with different keys.
        numbers = datasets.Dataset.from_dict({"row": list(range(len(rows)))})
        return SupervisedDatasetFromHFDataset(
            numbers, self.common_config.batch_size, map_fn=lambda number: self._datum(rows[number["row"]], labels)
        )

    def _datum(self, row: DistributionRow, labels: Sequence[str]) -> tinker.Datum:
        """Build the datum of a row.

        Raises:
            ConfigError: the prompt is cut, or two labels begin with the same token.
        """
        starts = [self._start_of_answer(row.prompt, label) for label in labels]
        inputs, tokens_K = starts[0][0], [token for _, token in starts]
        for index, token in enumerate(tokens_K):
            if token in tokens_K[:index]:
                other = labels[tokens_K.index(token)]
                raise ConfigError(
                    f"The labels {other!r} and {labels[index]!r} begin with the same token {token}: "
                    "use labels that differ in their first token."
                )
        weights_TK = torch.zeros(inputs.length, len(labels))
        weights_TK[-1] = torch.tensor([row.distribution.get(label, 0.0) for label in labels])
        tensors = {"target_tokens": torch.tensor(tokens_K).expand(inputs.length, -1), "weights": weights_TK}
        return tinker.Datum(
            model_input=inputs,
            loss_fn_inputs={name: tinker.TensorData.from_torch(value.contiguous()) for name, value in tensors.items()},
        )

    def _start_of_answer(self, prompt: str, label: str) -> tuple[tinker.ModelInput, int]:
        """Return the tokens before an answer, and its first token."""
        limit = self.common_config.max_length
        datum = conversation_to_datum(
            [Message(role="user", content=prompt), Message(role="assistant", content=label)],
            self.renderer,
            limit,
            TrainOnWhat.LAST_ASSISTANT_MESSAGE,
        )
        is_answer_T = datum.loss_fn_inputs["weights"].to_torch() > 0
        if not is_answer_T.any():
            raise ConfigError(
                f"The prompt {prompt[:60]!r} leaves no room for an answer in {limit} tokens: raise "
                "common_config.max_length."
            )
        first = int(is_answer_T.nonzero()[0])
        tokens = datum.model_input.to_ints()[: first + 1]
        return tinker.ModelInput.from_ints(tokens), int(datum.loss_fn_inputs["target_tokens"].to_torch()[first])


def _read(path: str) -> list[DistributionRow]:
    return parse_rows(path, parse_distribution_row, "prompt and distribution")


def parse_distribution_row(row: Mapping[str, Any]) -> DistributionRow:
    """Parse the JSON object of a row.

    Raises:
        TypeError, KeyError, ValueError: a field is missing, of another type, or no distribution.

    >>> parse_distribution_row({"prompt": "Is it good?", "distribution": {"yes": 3, "no": 1}})
    DistributionRow(prompt='Is it good?', distribution={'yes': 0.75, 'no': 0.25})
    """
    prompt, distribution = row["prompt"], row["distribution"]
    if not isinstance(prompt, str):
        raise TypeError(f"prompt is {prompt!r}; write a text")
    if not isinstance(distribution, dict) or not all(type(share) in (int, float) for share in distribution.values()):
        raise TypeError(f"distribution is {distribution!r}; write numbers by label")
    total = math.fsum(distribution.values())
    if min(distribution.values(), default=-1) < 0 or not 0 < total < math.inf:
        raise ValueError(f"distribution is {distribution!r}; write finite numbers of at least 0, one of them above 0")
    return DistributionRow(prompt, {label: share / total for label, share in distribution.items()})
