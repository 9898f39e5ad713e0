"""Judges of two answers as tinker-cookbook's preference models: one that was trained to judge, one that is asked."""

from __future__ import annotations

import chz
import tinker
from tinker_cookbook.completers import TinkerMessageCompleter
from tinker_cookbook.preference.types import (
    Comparison,
    PreferenceModel,
    PreferenceModelBuilder,
    PreferenceModelFromChatRenderer,
)
from tinker_cookbook.renderers import Message, get_renderer, get_text_content
from tinker_cookbook.tokenizer_utils import get_tokenizer

from tasks.judges import Judge, ask_completer, build_judge
from tasks.renderer import renderer_of
from tasks.weights import open_sampler


class JudgedPreference(PreferenceModel):
    """A judge of `tasks.judges` as a preference model; the question is what the user said last."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    async def __call__(self, comparison: Comparison) -> float:
        question = get_text_content(comparison.prompt_conversation[-1])
        first, second = (_text(each) for each in (comparison.completion_A, comparison.completion_B))
        return 1 - 2 * await self._judge({"question": question}, first, second)


@chz.chz
class JudgeBuilder(PreferenceModelBuilder):
    """A judge by the import path of a function, as of `tasks.judges`."""

    judge: str

    def __call__(self) -> PreferenceModel:
        return JudgedPreference(build_judge(self.judge, {}))


@chz.chz
class PairwiseBuilder(PreferenceModelBuilder):
    """A model that was trained to judge, as tinker-cookbook's `ChatDatasetBuilderFromComparisons` writes comparisons.

    Attributes:
        path: its checkpoint, `tinker://...`.
        model_name_for_tokenizer, renderer_name, session: the run fills them in.
    """

    path: str
    model_name_for_tokenizer: str
    renderer_name: str
    session: tinker.ServiceClient = chz.field(meta_factory=None)

    def __call__(self) -> PreferenceModel:
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer))
        sampler, _ = open_sampler(self.session, self.path, self.path)
        return PreferenceModelFromChatRenderer(renderer, sampler)


@chz.chz
class AskedBuilder(PreferenceModelBuilder):
    """Any model, trained to judge or not: it is asked in words which answer is better, in both orders.

    Attributes:
        model: base model by the service's name.
        path: checkpoint, `tinker://...`; empty for the base model.
        max_tokens: of what it says, at whose end the verdict is.
        session: the run fills it in.
    """

    model: str
    session: tinker.ServiceClient = chz.field(meta_factory=None)
    path: str = ""
    max_tokens: int = 16

    def __call__(self) -> PreferenceModel:
        sampler, tokenizer = open_sampler(self.session, self.path, self.model)
        renderer = get_renderer(renderer_of(self.model, tokenizer), tokenizer)
        return JudgedPreference(ask_completer(TinkerMessageCompleter(sampler, renderer, self.max_tokens, None, 0.0)))


def _text(answer: list[Message]) -> str:
    return "\n".join(get_text_content(message) for message in answer)
