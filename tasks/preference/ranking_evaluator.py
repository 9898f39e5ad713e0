"""Evaluator of a pairwise preference model on held-out pairs of answers."""

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
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from blocks.storage import RunDirectory
from tasks.common.renderers import renderer_name_of
from tasks.common.sampling import open_renderer
from tasks.common.tokenizers import TokenizedEvaluator
from tasks.preference.dataset import Comparisons, build_comparisons
from tasks.training.token_meter import TokenMeter


class RankingEvaluator(TokenizedEvaluator):
    """Accuracy `test/accuracy`: share of correct verdicts on held-out pairs, each judged in both orders."""

    def __init__(  # noqa: PLR0913 - a builder with its parameters, a renderer and the resources of the run
        self,
        builder: str,
        params: Mapping[str, Any],
        model: str,
        renderer_name: str | None = None,
        *,
        session: tinker.ServiceClient | None = None,
        token_meter: TokenMeter | None = None,
        directory: RunDirectory | None = None,
        base_model: str | None = None,
    ) -> None:
        """Create an evaluator of the held-out comparisons of a tinker-cookbook builder.

        Args:
            model: name of the trained model on the service.
            renderer_name: renderer of the training data; None for the model's own.
            session, token_meter, directory, base_model: resources of the run for the builder; see
                `tasks.common.builders.build`.
        """
        self._builder, self._params, self._model, self._renderer_name = builder, params, model, renderer_name
        resources = {
            "session": session,
            "token_meter": token_meter,
            "directory": directory,
            "base_model": base_model,
        }
        self._resources = {name: value for name, value in resources.items() if value is not None}

    async def measure(self, sampler: tinker.SamplingClient, tokenizer: Tokenizer) -> dict[str, float]:
        """Return the accuracy, or no metrics if the builder has no held-out rows.

        Raises:
            ConfigError: the verdicts start with the same token, the renderer is unknown or does not suit the tokenizer,
                or the builder fails (`build_comparisons`).
        """
        renderer = open_renderer(self._renderer_name or renderer_name_of(self._model, tokenizer), tokenizer)
        _check_verdicts(renderer)
        _, test = build_comparisons(self._builder, self._params, tokenizer, self._resources)
        if test is None:
            return {}
        judge = PreferenceModelFromChatRenderer(renderer, sampler)
        comparisons = [comparison for index in range(len(test)) for comparison in _both_orders(test, index)]
        verdicts = await asyncio.gather(*(judge(comparison) for comparison, _ in comparisons))
        right = [verdict == expected for verdict, (_, expected) in zip(verdicts, comparisons, strict=True)]
        return {"test/accuracy": sum(right) / len(right)}


def _both_orders(test: Comparisons, index: int) -> list[tuple[Comparison, float]]:
    """Comparison of a row in both orders, each with its correct verdict."""
    row = test[index]
    comparison = Comparison(list(row.prompt), list(row.chosen), list(row.rejected))
    return [(comparison, -1.0), (comparison.swap(), 1.0)]


def _check_verdicts(renderer: Renderer) -> None:
    """Check that the two verdicts differ in their first token, because only this token is trained."""
    prompt, answer = [Message(role="user", content="?")], [Message(role="assistant", content="!")]
    comparison = Comparison(prompt, answer, answer)
    render = ComparisonRendererFromChatRenderer(renderer).to_model_input_weights
    first, second = (render(LabeledComparison(comparison, label))[0].to_ints() for label in ("A", "B"))
    if first == second:
        raise ConfigError(
            f"With the renderer {type(renderer).__name__}, the verdicts A and B start with the same token, the only "
            "one that a pairwise judge is trained on: set renderer_name to another renderer."
        )
