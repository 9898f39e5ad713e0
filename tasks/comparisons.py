"""Pairs of answers to one prompt, the better one known: the comparisons of any tinker-cookbook builder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tinker
import torch
from datasets import Dataset
from tinker import types
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from objectives.labels import PREFIX
from tasks.data import build


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt, the better one and the other."""

    prompt: Sequence[Message]
    chosen: Sequence[Message]
    rejected: Sequence[Message]


class Comparisons:
    """The rows of a dataset that say which answer is the better one; ties, and rows that its builder drops, are not."""

    def __init__(self, builder: ComparisonDatasetBuilder, rows: Dataset) -> None:
        self._builder, self._rows = builder, rows
        self._kept = [index for index, row in enumerate(rows) if self._read(row) is not None]

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Preference:
        preference = self._read(self._rows[self._kept[index]])
        assert preference is not None, "kept"
        return preference

    def _read(self, row: Any) -> Preference | None:
        labelled = self._builder.example_to_labeled_comparison(row)
        if labelled is None or labelled.label == "Tie":
            return None
        comparison = labelled.comparison
        answers = comparison.completion_A, comparison.completion_B
        chosen, rejected = answers if labelled.label == "A" else reversed(answers)
        return Preference(comparison.prompt_conversation, chosen, rejected)


def build_comparisons(
    builder: str, params: Mapping[str, Any], tokenizer: Tokenizer
) -> tuple[Comparisons, Comparisons | None]:
    """Construct a `ComparisonDatasetBuilder` by import path; its comparisons to train and, where it has some, to test.

    Raises:
        ConfigError: no such builder, wrong parameters, data that it cannot read, or no comparison in it.
    """

    def read(made: Any) -> tuple[Comparisons, Comparisons | None]:
        if not isinstance(made, ComparisonDatasetBuilder):
            raise TypeError(
                f"it is no ComparisonDatasetBuilder; of a {type(made).__name__}, name its comparison_builder"
            )
        train, test = made.get_train_and_test_datasets()
        return Comparisons(made, train), None if test is None else Comparisons(made, test)

    train, test = build("comparisons", builder, params, tokenizer, read)
    if test is not None and len(test) == 0:
        raise ConfigError(
            f"The held-out rows of {builder} hold no comparison: check comparisons.params, or leave them out."
        )
    return train, test


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is asked behind an answer, and the word for a good one, whose log-probability is then the answer's score.

    Source: the generative verifiers of Zhang et al. 2024 (arXiv:2408.15240), section 3.1: a score without another head.
    """

    question: str
    good: str


@dataclass(frozen=True, slots=True)
class Rendering:
    """How messages become datums.

    Attributes:
        renderer: of the model.
        max_length: tokens of a datum; what is beyond is cut off.
        verdict: what is trained in place of the answers; None for the answers.
    """

    renderer: Renderer
    max_length: int | None
    verdict: Verdict | None = None

    def pair(self, preference: Preference, number: int) -> list[tinker.Datum]:
        """Both answers as datums with the labels ``pair`` and ``desirable``; none where `max_length` cuts one away.

        Nor where it leaves two that are the same.
        """
        chosen, rejected = (
            self.datum([*preference.prompt, *each]) for each in (preference.chosen, preference.rejected)
        )
        if not (_trains(chosen) and _trains(rejected)) or _tokens(chosen) == _tokens(rejected):
            return []
        return [_labelled(chosen, pair=number, desirable=1), _labelled(rejected, pair=number, desirable=0)]

    def datum(self, conversation: Sequence[Message]) -> tinker.Datum:
        """A conversation of which the last answer, or the verdict on it, has the weight 1 on each of its tokens."""
        said = list(conversation)
        if self.verdict:
            said.append(Message(role="user", content=self.verdict.question))
            said.append(Message(role="assistant", content=self.verdict.good))
        tokens, weights = self.renderer.build_supervised_example(said)
        return datum_from_model_input_weights(tokens, weights, self.max_length, reduction="none")


def _labelled(datum: tinker.Datum, **labels: int) -> tinker.Datum:
    added = {f"{PREFIX}{name}": types.TensorData.from_torch(torch.tensor([label])) for name, label in labels.items()}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs={**datum.loss_fn_inputs, **added})


def _trains(datum: tinker.Datum) -> bool:
    return any(datum.loss_fn_inputs["weights"].data)


def _tokens(datum: tinker.Datum) -> list[float]:
    return [*datum.model_input.to_ints(), *datum.loss_fn_inputs["target_tokens"].data[-1:]]
