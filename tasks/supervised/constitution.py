"""Constitutional data: a model answers, criticizes its answer by a principle, and revises it for training.

Source: Bai et al. 2022, "Constitutional AI: Harmlessness from AI Feedback" (arXiv:2212.08073), section 3.1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import chz
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.types import SupervisedDataset

from blocks.errors import ConfigError
from tasks.common.jsonl import QUESTION, fill, read_rows
from tasks.supervised.generated_data import CachedSampler, Conversation, GeneratedDataBuilder

CRITIQUE = "Say where your last answer does not follow this principle: {principle}"
REVISION = "Write your answer again, so that it follows the principle. Write nothing but the answer."


@chz.chz
class RevisedBuilder(GeneratedDataBuilder):
    """Prompts of a JSONL file; a model answers them and revises its answers by its own critiques.

    Attributes:
        path: JSONL file whose rows have the fields of `prompt`.
        test_path: held-out rows, answered and revised in the same way.
        prompt: template of the prompt, with fields of the row in braces.
        principles: principles of good answers; each revision uses a random one.
        num_revisions: number of consecutive revisions.
        critique: template of the request for a critique, with `{principle}`.
        revision: request for the revised answer.
    """

    path: str
    principles: Sequence[str]
    test_path: str | None = None
    prompt: str = QUESTION
    num_revisions: int = 1
    critique: str = CRITIQUE
    revision: str = REVISION

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        if "{principle}" not in self.critique:
            raise ConfigError(f"critique is {self.critique!r}, without the principle: insert {{principle}}.")
        sampler = self.open_cached_sampler()
        train = self.dataset(self._revised(sampler, self.path), self.common_config.batch_size)
        test = self._revised(sampler, self.test_path) if self.test_path else []
        return train, self.dataset(test, len(test)) if test else None

    def _revised(self, sampler: CachedSampler, path: str) -> list[Conversation]:
        """Prompts with the last revision of their answers; a prompt with an incomplete reply is skipped."""
        prompts = [Message(role="user", content=fill(self.prompt, row)) for row in read_rows(path, ())]
        conversations = self._with_replies(sampler, [[prompt] for prompt in prompts])
        for number in range(self.num_revisions):
            principles = [self._principle(str(messages[0]["content"]), number) for messages in conversations]
            requests = [fill(self.critique, {"principle": principle}) for principle in principles]
            criticized = self._with_replies(sampler, _with_requests(conversations, requests))
            conversations = self._with_replies(sampler, _with_requests(criticized, [self.revision] * len(criticized)))
        return [[messages[0], messages[-1]] for messages in conversations]

    def _with_replies(self, sampler: CachedSampler, conversations: Sequence[Conversation]) -> list[list[Message]]:
        """Conversations extended by a reply of the model, without those that have no complete reply."""
        answers = sampler.sample(conversations, self.sampling())
        return [
            [*messages, Message(role="assistant", content=texts[0])]
            for messages, texts in zip(conversations, answers, strict=True)
            if texts
        ]

    def _principle(self, question: str, number: int) -> str:
        return random.Random(f"{self.seed} {number} {question}").choice(list(self.principles))


def _with_requests(conversations: Sequence[Conversation], requests: Sequence[str]) -> list[list[Message]]:
    pairs = zip(conversations, requests, strict=True)
    return [[*messages, Message(role="user", content=request)] for messages, request in pairs]
