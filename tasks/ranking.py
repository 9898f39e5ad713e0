"""How well a model that was trained to judge ranks held-out pairs of answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import tinker
from tinker_cookbook.preference.types import (
    Comparison,
    ComparisonRendererFromChatRenderer,
    LabeledComparison,
    PreferenceModelFromChatRenderer,
)
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from tasks.comparisons import Comparisons, build_comparisons
from tasks.renderer import renderer_of
from tasks.sample import open_renderer
from tasks.tokenized import TokenizedEvaluator


class Ranking(TokenizedEvaluator):
    """`test/accuracy`: the share of held-out pairs whose better answer the weights prefer, asked in both orders."""

    def __init__(self, builder: str, params: Mapping[str, Any], model: str, renderer_name: str | None = None) -> None:
        """The comparisons of a tinker-cookbook builder, those of its held-out rows.

        Args:
            model: that is trained, by the service's name.
            renderer_name: as in its data; None for the model's own.
        """
        self._builder, self._params, self._model, self._renderer_name = builder, params, model, renderer_name

    async def measure(self, sampler: tinker.SamplingClient, tokenizer: Tokenizer) -> dict[str, float]:
        """The accuracy; nothing where the builder holds no rows out.

        Raises:
            ConfigError: the verdicts begin alike.
        """
        renderer = open_renderer(self._renderer_name or renderer_of(self._model, tokenizer), tokenizer)
        _check_verdicts(renderer)
        _, test = build_comparisons(self._builder, self._params, tokenizer)
        if test is None:
            return {}
        judge = PreferenceModelFromChatRenderer(renderer, sampler)
        compared = [each for index in range(len(test)) for each in _both_orders(test, index)]
        said = await asyncio.gather(*(judge(comparison) for comparison, _ in compared))
        right = [said_of_one == wanted for said_of_one, (_, wanted) in zip(said, compared, strict=True)]
        return {"test/accuracy": sum(right) / len(right)}


def _both_orders(test: Comparisons, index: int) -> list[tuple[Comparison, float]]:
    row = test[index]
    comparison = Comparison(list(row.prompt), list(row.chosen), list(row.rejected))
    return [(comparison, -1.0), (comparison.swap(), 1.0)]


def _check_verdicts(renderer: Renderer) -> None:
    """Hold the renderer to verdicts that differ in their first token, which is the one that is trained."""
    said = [{"role": "user", "content": "?"}], [{"role": "assistant", "content": "!"}]
    comparison = Comparison(said[0], said[1], said[1])  # pyright: ignore[reportArgumentType]
    write = ComparisonRendererFromChatRenderer(renderer).to_model_input_weights
    first, second = (write(LabeledComparison(comparison, label))[0].to_ints() for label in ("A", "B"))
    if first == second:
        raise ConfigError(
            f"With the renderer {type(renderer).__name__} and this model's tokenizer the verdicts A and B begin with "
            "the same token, which is all that a pairwise judge is trained on: set renderer_name to another renderer."
        )
