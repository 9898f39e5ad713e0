"""Noisy-student self-training: a teacher answers questions several times, and what it agrees on teaches a student.

Source: Xie et al. 2020 (arXiv:1911.04252); kept by the vote of the samples as in Huang et al. 2022 (arXiv:2210.11610),
and with the words of the question dropped as noise as in He et al. 2020 (arXiv:1909.13788).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import chz
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.types import SupervisedDataset

from tasks.data import import_object
from tasks.graders import final_answer
from tasks.questions import QUESTION, fill
from tasks.rows import read_rows
from tasks.written import Conversation, WrittenBuilder


@chz.chz
class SelfTrainingBuilder(WrittenBuilder):
    """The questions of a JSONL file with a teacher's answers to them, as far as these are to be trusted.

    Attributes:
        path: rows with a `question`.
        labelled_path: rows with an `answer` besides, which are learned as they are, without noise.
        test_path: held-out rows of that kind.
        asked: what teacher and student are asked, with fields of the row in braces.
        num_samples: of the teacher, of each question.
        min_agreement: the share of them that has to say the same, by its final number or all of its text.
        grader: import path of a function of a row and an answer that says whether it is right, in place of the vote.
        max_kept: answers of each question that are learned, all different.
        drop_words: the share of words that the student does not see of a question.
    """

    path: str
    labelled_path: str | None = None
    test_path: str | None = None
    asked: str = QUESTION
    num_samples: int = 8
    min_agreement: float = 0.5
    grader: str | None = None
    max_kept: int = 1
    drop_words: float = 0.1

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        rows = read_rows(self.path, ("question",))
        asked = [[_said("user", fill(self.asked, row))] for row in rows]
        answers = self.open_notebook().answers(asked, self.sampling(self.num_samples))
        taught = [
            [_said("user", drop_words(str(prompt["content"]), self.drop_words, self._draw(number, index))), said]
            for number, (row, (prompt,), found) in enumerate(zip(rows, asked, answers, strict=True))
            for index, said in enumerate(_said("assistant", each) for each in self._trusted(row, found))
        ]
        labelled = self._labelled(self.labelled_path)
        train = self.dataset([*labelled, *taught], self.common_config.batch_size)
        test = self._labelled(self.test_path)
        return train, self.dataset(test, len(test)) if test else None

    def _trusted(self, row: Mapping[str, str], answers: Sequence[str]) -> list[str]:
        if self.grader is None:
            kept = agreed(answers, self.num_samples, self.min_agreement)
        else:
            is_right = import_object(self.grader, "data.params.grader")
            kept = [each for each in answers if is_right(row, each)]
        return list(dict.fromkeys(kept))[: self.max_kept]

    def _labelled(self, path: str | None) -> list[Conversation]:
        rows = read_rows(path, ("question", "answer")) if path else []
        return [[_said("user", fill(self.asked, row)), _said("assistant", row["answer"])] for row in rows]

    def _draw(self, *place: int) -> random.Random:
        return random.Random(f"{self.seed} {place}")


def agreed(answers: Sequence[str], num_samples: int, min_agreement: float) -> list[str]:
    """The answers that say what most of them say; none where those are too few of the samples.

    >>> agreed(["It is 4.", "4", "5"], num_samples=4, min_agreement=0.5)
    ['It is 4.', '4']
    >>> agreed(["It is 4.", "4", "5"], num_samples=8, min_agreement=0.5)
    []
    """
    said = [final_answer(each) for each in answers]
    most, votes = Counter(said).most_common(1)[0] if said else ("", 0)
    enough = most != "" and votes >= min_agreement * num_samples
    return [each for each, vote in zip(answers, said, strict=True) if vote == most] if enough else []


def drop_words(text: str, share: float, draw: random.Random) -> str:
    """A text without each of its words by this chance, and never without all of them.

    >>> drop_words("What is 7 + 38?", 0.4, random.Random(0))
    'What is 7 38?'
    """
    words = text.split(" ")
    return " ".join([word for word in words if draw.random() >= share] or words)


def _said(role: Any, content: str) -> Message:
    return Message(role=role, content=content)
