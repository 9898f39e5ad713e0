"""Noisy-student self-training: a teacher samples several answers per question; a student learns the majority answer.

Source: Xie et al. 2020 (arXiv:1911.04252), with the majority vote of Huang et al. 2022 (arXiv:2210.11610) and the word
dropout of He et al. 2020 (arXiv:1909.13788).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import chz
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.types import SupervisedDataset

from tasks.common.builders import import_function
from tasks.common.graders import final_answer
from tasks.common.jsonl import QUESTION, fill, read_rows
from tasks.supervised.generated_data import Conversation, GeneratedDataBuilder


@chz.chz
class SelfTrainingBuilder(GeneratedDataBuilder):
    """Questions of a JSONL file with the answers of a teacher that pass a vote or a grader.

    Attributes:
        path: JSONL file whose rows have a `question`.
        labelled_path: JSONL file whose rows have a `question` and an `answer`, which are trained on without noise.
        test_path: held-out rows with a `question` and an `answer`.
        prompt: template of the prompt, with fields of the row in braces.
        num_samples: number of the teacher's answers per question.
        min_agreement: share of the `num_samples` answers, truncated ones included, that must agree in their final
            number, or in their text if they have none.
        grader: import path of a function ``(row, answer) -> bool`` that replaces the vote.
        max_kept: maximum number of distinct answers per question to train on.
        drop_words: probability of dropping each word from the student's prompt.
    """

    path: str
    labelled_path: str | None = None
    test_path: str | None = None
    prompt: str = QUESTION
    num_samples: int = 8
    min_agreement: float = 0.5
    grader: str | None = None
    max_kept: int = 1
    drop_words: float = 0.1

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        rows = read_rows(self.path, ("question",))
        prompts = [fill(self.prompt, row) for row in rows]
        conversations = [[_message("user", prompt)] for prompt in prompts]
        answers_P = self.open_cached_sampler().sample(conversations, self.sampling(self.num_samples))
        generated = [
            [
                _message("user", drop_words(prompt, self.drop_words, self._random(number, index))),
                _message("assistant", answer),
            ]
            for number, (row, prompt, answers) in enumerate(zip(rows, prompts, answers_P, strict=True))
            for index, answer in enumerate(self._accepted(row, answers))
        ]
        labeled = self._labeled(self.labelled_path)
        train = self.dataset([*labeled, *generated], self.common_config.batch_size)
        test = self._labeled(self.test_path)
        return train, self.dataset(test, len(test)) if test else None

    def _accepted(self, row: Mapping[str, str], answers: Sequence[str]) -> list[str]:
        if self.grader is None:
            accepted = majority_answers(answers, self.num_samples, self.min_agreement)
        else:
            is_right = import_function(self.grader, "data.params.grader")
            accepted = [answer for answer in answers if is_right(row, answer)]
        return list(dict.fromkeys(accepted))[: self.max_kept]

    def _labeled(self, path: str | None) -> list[Conversation]:
        rows = read_rows(path, ("question", "answer")) if path else []
        return [[_message("user", fill(self.prompt, row)), _message("assistant", row["answer"])] for row in rows]

    def _random(self, *indices: int) -> random.Random:
        return random.Random(f"{self.seed} {indices}")


def majority_answers(answers: Sequence[str], num_samples: int, min_agreement: float) -> list[str]:
    """Answers that agree with the most common final answer; empty if their share of the samples is too small.

    >>> majority_answers(["It is 4.", "4", "5"], num_samples=4, min_agreement=0.5)
    ['It is 4.', '4']
    >>> majority_answers(["It is 4.", "4", "5"], num_samples=8, min_agreement=0.5)
    []
    """
    finals = [final_answer(answer) for answer in answers]
    majority, votes = Counter(finals).most_common(1)[0] if finals else ("", 0)
    if majority == "" or votes < min_agreement * num_samples:
        return []
    return [answer for answer, final in zip(answers, finals, strict=True) if final == majority]


def drop_words(text: str, probability: float, generator: random.Random) -> str:
    """Drop each word with a probability; if that would drop all words, return the text unchanged.

    >>> drop_words("What is 7 + 38?", 0.4, random.Random(0))
    'What is 7 38?'
    """
    words = text.split(" ")
    return " ".join([word for word in words if generator.random() >= probability] or words)


def _message(role: Literal["user", "assistant"], content: str) -> Message:
    return Message(role=role, content=content)
