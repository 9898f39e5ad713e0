"""Constitution-style data: a model answers, criticizes its answer by a principle, and revises it; that is learned.

Source: Bai et al. 2022, "Constitutional AI: Harmlessness from AI Feedback" (arXiv:2212.08073), section 3.1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import chz
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.types import SupervisedDataset

from tasks.questions import QUESTION, fill
from tasks.rows import read_rows
from tasks.written import Conversation, Notebook, WrittenBuilder

CRITIQUE = "Say where your last answer does not follow this principle: {principle}"
REVISION = "Write your answer again, so that it follows the principle. Write nothing but the answer."


@chz.chz
class RevisedBuilder(WrittenBuilder):
    """The questions of a JSONL file with a model's answers to them, revised by its own critique.

    Attributes:
        path: rows with the fields that `asked` names.
        test_path: held-out rows, answered and revised likewise.
        asked: what is asked, with fields of the row in braces.
        principles: what answers should be; each revision goes by one of them, which is drawn.
        num_revisions: one after the other.
        critique, revision: what the model is told, the former with the `{principle}`.
    """

    path: str
    principles: Sequence[str]
    test_path: str | None = None
    asked: str = QUESTION
    num_revisions: int = 1
    critique: str = CRITIQUE
    revision: str = REVISION

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        notebook = self.open_notebook()
        train = self.dataset(self._revised(notebook, self.path), self.common_config.batch_size)
        test = self._revised(notebook, self.test_path) if self.test_path else []
        return train, self.dataset(test, len(test)) if test else None

    def _revised(self, notebook: Notebook, path: str) -> list[Conversation]:
        """Each question with the last revision of its answer; without those to which the model said nothing."""
        asked = [Message(role="user", content=fill(self.asked, row)) for row in read_rows(path, ())]
        said = self._go_on(notebook, [[each] for each in asked])
        for number in range(self.num_revisions):
            principles = [self._principle(str(each[0]["content"]), number) for each in said]
            prompts = [fill(self.critique, {"principle": each}) for each in principles]
            criticized = self._go_on(notebook, _with(said, prompts))
            said = self._go_on(notebook, _with(criticized, [self.revision] * len(criticized)))
        return [[each[0], each[-1]] for each in said]

    def _go_on(self, notebook: Notebook, conversations: Sequence[Sequence[Message]]) -> list[list[Message]]:
        answers = notebook.answers(conversations, self.sampling())
        return [
            [*each, Message(role="assistant", content=found[0])]
            for each, found in zip(conversations, answers, strict=True)
            if found
        ]

    def _principle(self, question: str, number: int) -> str:
        return random.Random(f"{self.seed} {number} {question}").choice(list(self.principles))


def _with(conversations: Sequence[Sequence[Message]], prompts: Sequence[str]) -> list[list[Message]]:
    return [[*each, Message(role="user", content=prompt)] for each, prompt in zip(conversations, prompts, strict=True)]
