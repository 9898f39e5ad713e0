"""Judges as tinker-cookbook preference models: functions, trained pairwise models and prompted models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import chz
import tinker
from tinker_cookbook.completers import TinkerMessageCompleter
from tinker_cookbook.preference.types import (
    Comparison,
    PreferenceModel,
    PreferenceModelBuilder,
    PreferenceModelFromChatRenderer,
)
from tinker_cookbook.renderers import Message, Renderer, get_renderer, get_text_content
from tinker_cookbook.tokenizer_utils import get_tokenizer

from tasks.common.renderers import renderer_name_of
from tasks.preference.judges import Judge, JudgeGuidance, build_judge, completer_judge, judge_message
from tasks.training.token_meter import TokenMeter, open_counted_sampler


class VerdictTokens(NamedTuple):
    """Tokens of one comparison by a preference model.

    Attributes:
        model: base model that compares.
        num_calls: number of requests, each of which shows both answers.
        num_prompt_tokens: tokens of all requests, with empty answers.
        max_reply_tokens: maximum tokens of all replies; the minimum is one token each.
    """

    model: str
    num_calls: int
    num_prompt_tokens: int
    max_reply_tokens: int


class JudgedPreference(PreferenceModel):
    """Judge of `tasks.preference.judges` as a preference model.

    The judge's row has the last message of the prompt as `question`, and the whole prompt as `conversation`.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    async def __call__(self, comparison: Comparison) -> float:
        prompt = comparison.prompt_conversation
        row = {"question": get_text_content(prompt[-1]), "conversation": _transcript(prompt)}
        first, second = _text(comparison.completion_A), _text(comparison.completion_B)
        # A judge returns 1 if the first answer is better and 0 if the second is; a preference model returns -1 and 1.
        return 1 - 2 * await self._judge(row, first, second)


class PromptedJudge(JudgedPreference):
    """Judge that prompts a model for the better answer, in both orders."""

    def __init__(
        self, sampler: tinker.SamplingClient, renderer: Renderer, max_tokens: int, guidance: JudgeGuidance
    ) -> None:
        completer = TinkerMessageCompleter(sampler, renderer, max_tokens, stop_condition=None, temperature=0.0)
        ask = completer_judge(completer, guidance)

        async def judge(row: Mapping[str, str], first: str, second: str) -> float:
            return await ask({"question": row["conversation"]}, first, second)

        super().__init__(judge)
        self._sampler, self._renderer, self._max_tokens, self._guidance = sampler, renderer, max_tokens, guidance

    def count_tokens(self, prompt: Sequence[Message]) -> VerdictTokens:
        """Return the tokens of a comparison of two empty answers."""
        message = judge_message(self._guidance, _transcript(prompt), "", "")
        num_prompt_tokens = self._renderer.build_generation_prompt([message]).length
        return VerdictTokens(self._sampler.get_base_model(), 2, 2 * num_prompt_tokens, 2 * self._max_tokens)


@chz.chz
class JudgeBuilder(PreferenceModelBuilder):
    """Builder of a judge that calls a user's function.

    Attributes:
        judge: import path of a function of a row and two answers that returns a number from 0 (the second is better) to
            1 (the first is better). The row has the last message of the prompt as `question`, and the whole prompt as
            `conversation`.
    """

    judge: str

    def __call__(self) -> PreferenceModel:
        return JudgedPreference(build_judge(self.judge, {}))


@chz.chz
class PairwiseBuilder(PreferenceModelBuilder):
    """Builder of a pairwise preference model trained on tinker-cookbook's `ChatDatasetBuilderFromComparisons`.

    Attributes:
        path: checkpoint of the model, `tinker://...`; empty for the base model.
        model_name_for_tokenizer: filled in by the run.
        renderer_name: filled in by the run.
        session, token_meter, base_model: filled in by the run.
    """

    path: str
    model_name_for_tokenizer: str
    renderer_name: str
    session: tinker.ServiceClient = chz.field(meta_factory=None)
    token_meter: TokenMeter | None = chz.field(meta_factory=None, default=None)
    base_model: str = ""

    def __call__(self) -> PreferenceModel:
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer))
        model = self.path or self.base_model
        sampler, _ = open_counted_sampler(self.session, self.path, model, self.token_meter)
        return PreferenceModelFromChatRenderer(renderer, sampler)


@chz.chz
class PromptedJudgeBuilder(PreferenceModelBuilder):
    """Builder of a judge that prompts any model for the better answer, in both orders.

    Attributes:
        model: base model by the service's name.
        path: checkpoint, `tinker://...`; empty for the base model.
        max_tokens: maximum tokens of the reply, which ends with the verdict.
        criteria: criteria by which the answers are compared.
        principles: principles that a good answer follows.
        session, token_meter: filled in by the run.
    """

    model: str
    session: tinker.ServiceClient = chz.field(meta_factory=None)
    path: str = ""
    max_tokens: int = 512
    criteria: Sequence[str] = ()
    principles: Sequence[str] = ()
    token_meter: TokenMeter | None = chz.field(meta_factory=None, default=None)

    def __call__(self) -> PreferenceModel:
        sampler, tokenizer = open_counted_sampler(self.session, self.path, self.model, self.token_meter)
        renderer = get_renderer(renderer_name_of(self.model, tokenizer), tokenizer)
        return PromptedJudge(sampler, renderer, self.max_tokens, JudgeGuidance(self.criteria, self.principles))


def verdict_tokens(model: PreferenceModel, prompt: Sequence[Message]) -> VerdictTokens | None:
    """Return the tokens of a comparison of two empty answers; None for a model whose tokens are unknown."""
    if isinstance(model, PromptedJudge):
        return model.count_tokens(prompt)
    if isinstance(model, PreferenceModelFromChatRenderer):
        shown = model.comparison_renderer.build_generation_prompt(
            Comparison(list(prompt), [_empty_answer()], [_empty_answer()])
        )
        return VerdictTokens(model.sampling_client.get_base_model(), 1, shown.length, 1)
    return None


def _empty_answer() -> Message:
    return Message(role="assistant", content="")


def _transcript(prompt: Sequence[Message]) -> str:
    """Return a prompt as text: a single message alone, several ones with their roles."""
    if len(prompt) == 1:
        return get_text_content(prompt[0])
    return "\n\n".join(f"{message['role']}: {get_text_content(message)}" for message in prompt)


def _text(answer: list[Message]) -> str:
    return "\n".join(get_text_content(message) for message in answer)
