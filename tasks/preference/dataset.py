"""Preference datasets: labeled pairs of answers from any tinker-cookbook comparison builder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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
from tasks.common.builders import NO_RESOURCES, build


@dataclass(frozen=True, slots=True)
class Preference:
    """Prompt with its chosen and its rejected answer."""

    prompt: Sequence[Message]
    chosen: Sequence[Message]
    rejected: Sequence[Message]


class Comparisons:
    """Preferences of a dataset, without ties and without rows that the builder drops."""

    def __init__(self, builder: ComparisonDatasetBuilder, rows: Dataset) -> None:
        self._builder, self._rows = builder, rows
        self._indices = [index for index, row in enumerate(rows) if self._read(row) is not None]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Preference:
        preference = self._read(self._rows[self._indices[index]])
        assert preference is not None, "`_indices` contains readable rows only"
        return preference

    def _read(self, row: Any) -> Preference | None:
        labeled = self._builder.example_to_labeled_comparison(row)
        if labeled is None or labeled.label == "Tie":
            return None
        comparison = labeled.comparison
        answers = comparison.completion_A, comparison.completion_B
        chosen, rejected = answers if labeled.label == "A" else reversed(answers)
        return Preference(comparison.prompt_conversation, chosen, rejected)


def held_out_comparisons(builder: ComparisonDatasetBuilder, rows: Dataset | None) -> Comparisons | None:
    """Return the comparisons of held-out rows; None if `rows` is None.

    Raises:
        ConfigError: the rows have no comparison.
    """
    if rows is None:
        return None
    comparisons = Comparisons(builder, rows)
    if len(comparisons) == 0:
        raise ConfigError(
            f"The held-out rows of {type(builder).__name__} have no comparison: check its parameters, or drop the "
            "held-out rows."
        )
    return comparisons


def build_comparisons(
    builder: str, params: Mapping[str, Any], tokenizer: Tokenizer, resources: Mapping[str, Any] = NO_RESOURCES
) -> tuple[Comparisons, Comparisons | None]:
    """Construct a `ComparisonDatasetBuilder` by import path; return its training and, if any, held-out comparisons.

    Args:
        resources: open resources of the run for builders with matching parameters; see `build`.

    Raises:
        ConfigError: the builder does not exist, rejects its parameters or cannot read its data, or its held-out rows
            have no comparison.
    """

    def read(instance: object) -> tuple[Comparisons, Comparisons | None]:
        if not isinstance(instance, ComparisonDatasetBuilder):
            raise TypeError(
                f"a {type(instance).__name__} is not a ComparisonDatasetBuilder; give its comparison_builder"
            )
        train, test = instance.get_train_and_test_datasets()
        return Comparisons(instance, train), held_out_comparisons(instance, test)

    return build("comparisons", builder, params, tokenizer, read, resources)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Follow-up question about an answer, and the reply if the answer is good; the reply's logprob scores the answer.

    Source: the generative verifiers of Zhang et al. 2024 (arXiv:2408.15240), section 3.1, which need no extra head.
    """

    question: str
    good: str


@dataclass(frozen=True, slots=True)
class Rendering:
    """Conversion of conversations to datums.

    Attributes:
        renderer: renderer of the model.
        max_length: maximum number of tokens of a datum; longer conversations are truncated.
        verdict: verdict to train on instead of the answers; None to train on the answers.
    """

    renderer: Renderer
    max_length: int | None
    verdict: Verdict | None = None

    def pair(self, preference: Preference, number: int) -> list[tinker.Datum]:
        """Return both answers as datums with the labels ``pair`` and ``desirable``.

        The list is empty if truncation to `max_length` removes an answer, or if both answers are equal before or after
        truncation.
        """
        chosen, rejected = (
            self.datum([*preference.prompt, *answer]) for answer in (preference.chosen, preference.rejected)
        )
        if not (_trains(chosen) and _trains(rejected)) or _tokens(chosen) == _tokens(rejected):
            return []
        return [_with_labels(chosen, pair=number, desirable=1), _with_labels(rejected, pair=number, desirable=0)]

    def datum(self, conversation: Sequence[Message]) -> tinker.Datum:
        """Datum with weight 1 on each token of the last answer, or of the verdict on it."""
        messages = list(conversation)
        if self.verdict:
            messages.append(Message(role="user", content=self.verdict.question))
            messages.append(Message(role="assistant", content=self.verdict.good))
        tokens, weights = self.renderer.build_supervised_example(messages)
        return datum_from_model_input_weights(tokens, weights, self.max_length, reduction="none")


def _with_labels(datum: tinker.Datum, **labels: int) -> tinker.Datum:
    inputs = {f"{PREFIX}{name}": types.TensorData.from_torch(torch.tensor([label])) for name, label in labels.items()}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs={**datum.loss_fn_inputs, **inputs})


def _trains(datum: tinker.Datum) -> bool:
    return any(datum.loss_fn_inputs["weights"].data)


def _tokens(datum: tinker.Datum) -> list[object]:
    """Tokens of a datum, and its images as chunks."""
    chunks = datum.model_input.chunks
    parts = [chunk.tokens if isinstance(chunk, tinker.EncodedTextChunk) else [chunk] for chunk in chunks]
    return [*chain.from_iterable(parts), *datum.loss_fn_inputs["target_tokens"].data[-1:]]
