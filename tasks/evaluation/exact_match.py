"""Exact match: the share of sampled answers that agree with the expected one, such as a GSM8K problem's number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import ClassVar

from pydantic.dataclasses import dataclass

from blocks.errors import ConfigError
from tasks.common.builders import import_object
from tasks.common.sampling import Answer
from tasks.evaluation.base import SampledEvaluator
from tasks.evaluation.grading_metrics import Graded


@dataclass(frozen=True, kw_only=True)
class ExactMatch(SampledEvaluator):
    """Share of correct answers to the questions of a JSONL file with `question` and `answer`.

    Attributes:
        grader: import path of a function ``(answer, expected) -> bool``.
    """

    required: ClassVar[tuple[str, ...]] = ("question", "answer")

    name: str = "exact_match"
    grader: str = "tasks.common.graders:same_number"

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.is_right

    @cached_property
    def is_right(self) -> Callable[[str, str], bool]:
        """Imported grader."""
        return import_object(self.grader, "grader")

    def question(self, row: Mapping[str, str]) -> str:
        return f"{row['question']}\n{self.instruction}" if self.instruction else row["question"]

    async def grade(self, answer: Answer, row: Mapping[str, str]) -> Graded:
        try:
            return Graded(bool(self.is_right(answer.text, row["answer"])), answer.truncated)
        except Exception as error:  # user code called with sampled text
            raise ConfigError(f"The grader {self.grader} failed ({type(error).__name__}: {error}): fix it.") from error
