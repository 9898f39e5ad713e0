"""Evaluators that sample answers and grade each one: the base classes, exact match, and unit tests of code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import cached_property
from typing import ClassVar

import tinker
from pydantic.dataclasses import dataclass
from tinker_cookbook.renderers import Message
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from tasks.common.builders import import_function
from tasks.common.jsonl import read_rows
from tasks.common.sampling import Answer, Sampling, open_renderer, sample_answers
from tasks.common.tokenizers import TokenizedEvaluator
from tasks.evaluation.grading_metrics import Graded, check_pass_at, digest_problems, scores_by_problem, summarize
from tasks.sandbox.code_tests import run_tests_async
from tasks.sandbox.runner import Limits
from tasks.training.batch_source import SampledTokens


@dataclass(frozen=True, kw_only=True)
class GradedEvaluator(TokenizedEvaluator):
    """Evaluator that samples answers to problems and grades each one.

    Attributes:
        name: name of the metric `test/<name>`.
        pass_at: values of k to log pass@k for.
    """

    name: str
    pass_at: tuple[int, ...] = ()

    @property
    def scored_metrics(self) -> tuple[str, ...]:
        """Names of the metrics with a score for each problem."""
        return tuple(scores_by_problem(self.name, [], self.pass_at))


@dataclass(frozen=True, kw_only=True)
class SampledEvaluator(GradedEvaluator):
    """Evaluator over the problems of a JSONL file; a subclass defines the prompt and the grading.

    Attributes:
        required: fields that each row must have.
        path: JSONL file of problems.
        renderer_name: tinker-cookbook renderer of the model's chat format.
        instruction: instruction, which the subclass puts before or after each problem.
        limit: maximum number of problems, taken from the start of the file.
        sampling: sampling parameters.
    """

    required: ClassVar[tuple[str, ...]] = ()

    path: str
    renderer_name: str
    instruction: str = ""
    limit: int | None = None
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        """Validate `pass_at` and read the problems, so that errors surface before a run starts."""
        check_pass_at(self.pass_at, self.sampling.num_samples)
        _ = self.rows  # reads the file

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """Problems to answer."""
        return read_rows(self.path, self.required, self.limit)

    async def measure(self, sampler: tinker.SamplingClient, tokenizer: Tokenizer) -> dict[str, float]:
        renderer = open_renderer(self.renderer_name, tokenizer)
        answers_PG = await sample_answers(sampler, renderer, self._conversations, self.sampling)
        graded_PG = [
            list(await asyncio.gather(*(self.grade(answer, row) for answer in answers_G)))
            for row, answers_G in zip(self.rows, answers_PG, strict=True)
        ]
        problems = digest_problems(json.dumps(row, sort_keys=True) for row in self.rows)
        return summarize(self.name, graded_PG, self.pass_at, problems)

    def count_tokens(self, tokenizer: Tokenizer, num_tokens: int) -> SampledTokens:
        """Return the tokens of an evaluation whose answers have `num_tokens` tokens each."""
        renderer, num = open_renderer(self.renderer_name, tokenizer), self.sampling.num_samples
        prompts = [renderer.build_generation_prompt(conversation) for conversation in self._conversations]
        num_prompt_tokens = sum(prompt.length for prompt in prompts)
        num_cached_tokens = (num - 1) * num_prompt_tokens
        return SampledTokens(num * num_prompt_tokens, num * len(prompts) * num_tokens, num_cached_tokens)

    @property
    def _conversations(self) -> list[list[Message]]:
        return [[Message(role="user", content=self.question(row))] for row in self.rows]

    def question(self, row: Mapping[str, str]) -> str:
        """Prompt of a problem."""
        raise NotImplementedError

    async def grade(self, answer: Answer, row: Mapping[str, str]) -> Graded:
        """Grade an answer to a problem."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ExactMatch(SampledEvaluator):
    """Share of answers that a grader accepts. Each row of the JSONL file has a `question` and an `answer`.

    Attributes:
        grader: import path of a function ``(answer, expected) -> bool``; the default compares the final numbers.
    """

    required: ClassVar[tuple[str, ...]] = ("question", "answer")

    name: str = "exact_match"
    grader: str = "tasks.common.graders:same_number"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.grader_function  # imports the grader

    @cached_property
    def grader_function(self) -> Callable[[str, str], bool]:
        """Imported grader."""
        return import_function(self.grader, "grader")

    def question(self, row: Mapping[str, str]) -> str:
        return f"{row['question']}\n{self.instruction}" if self.instruction else row["question"]

    async def grade(self, answer: Answer, row: Mapping[str, str]) -> Graded:
        try:
            return Graded(bool(self.grader_function(answer.text, row["answer"])), answer.truncated)
        except Exception as error:  # user code called with sampled text
            raise ConfigError(f"The grader {self.grader} failed ({type(error).__name__}: {error}): fix it.") from error


@dataclass(frozen=True, kw_only=True)
class CodeTests(SampledEvaluator):
    """Share of functions that pass their tests. Each row of the JSONL file has the fields of HumanEval.

    Attributes:
        limits: resource limits of the code.
    """

    required: ClassVar[tuple[str, ...]] = ("prompt", "test", "entry_point")

    name: str = "code_tests"
    instruction: str = "Complete this function. Answer with the whole function in a ```python block."
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=512))
    limits: Limits = field(default_factory=Limits)

    def question(self, row: Mapping[str, str]) -> str:
        prompt = row["prompt"].removesuffix("\n")
        return f"{self.instruction}\n\n```python\n{prompt}\n```"

    async def grade(self, answer: Answer, row: Mapping[str, str]) -> Graded:
        passed, outcome = await run_tests_async(answer.text, row, self.limits)
        return Graded(passed, answer.truncated, outcome.timed_out)
