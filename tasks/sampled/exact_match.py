"""Exact match: the share of sampled answers that give the expected one, as the final number of a GSM8K problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import ClassVar

from pydantic.dataclasses import dataclass

from blocks.errors import ConfigError
from tasks.data import import_object
from tasks.sample import Answer
from tasks.sampled.evaluator import SampledEvaluator
from tasks.sampled.summary import Graded


@dataclass(frozen=True, kw_only=True)
class ExactMatch(SampledEvaluator):
    """The share of right answers to the questions of a JSONL file with `question` and `answer`.

    Attributes:
        grader: import path of a function of the answer's text and the expected one, to bool.
    """

    required: ClassVar[tuple[str, ...]] = ("question", "answer")

    name: str = "exact_match"
    grader: str = "tasks.graders:same_number"

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.is_right

    @cached_property
    def is_right(self) -> Callable[[str, str], bool]:
        """The grader."""
        return import_object(self.grader, "grader")

    def question(self, row: Mapping[str, str]) -> str:
        return f"{row['question']}\n{self.instruction}" if self.instruction else row["question"]

    async def grade(self, answer: Answer, row: Mapping[str, str]) -> Graded:
        try:
            return Graded(bool(self.is_right(answer.text, row["answer"])), answer.truncated)
        except Exception as error:  # somebody else's code, given whatever a model says
            raise ConfigError(f"The grader {self.grader} failed ({type(error).__name__}: {error}): mend it.") from error
