"""Code by unit tests: the share of sampled functions that pass them, run in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar

from pydantic.dataclasses import dataclass

from tasks.code_runs import run_tests_apart
from tasks.sample import Answer, Sampling
from tasks.sampled.evaluator import SampledEvaluator
from tasks.sampled.summary import Graded
from tasks.sandbox import Limits


@dataclass(frozen=True, kw_only=True)
class CodeTests(SampledEvaluator):
    """The share of right functions for a JSONL file with `prompt`, `test` and `entry_point`, as in HumanEval.

    Attributes:
        limits: what the code may use.
    """

    required: ClassVar[tuple[str, ...]] = ("prompt", "test", "entry_point")

    name: str = "code_tests"
    instruction: str = "Complete this function. Answer with the whole function in a ```python block."
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=512))
    limits: Limits = field(default_factory=Limits)

    def question(self, row: Mapping[str, str]) -> str:
        return f"{self.instruction}\n\n```python\n{row['prompt']}```"

    async def grade(self, answer: Answer, row: Mapping[str, str]) -> Graded:
        passed, outcome = await run_tests_apart(answer.text, row, self.limits)
        return Graded(passed, answer.truncated, outcome.timed_out)
