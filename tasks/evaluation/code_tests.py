"""Evaluator of code: the share of sampled functions that pass their unit tests in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar

from pydantic.dataclasses import dataclass

from tasks.common.sampling import Answer, Sampling
from tasks.evaluation.base import SampledEvaluator
from tasks.evaluation.grading_metrics import Graded
from tasks.sandbox.code_tests import run_tests_async
from tasks.sandbox.runner import Limits


@dataclass(frozen=True, kw_only=True)
class CodeTests(SampledEvaluator):
    """Share of correct functions for a JSONL file with `prompt`, `test` and `entry_point`, as in HumanEval.

    Attributes:
        limits: resource limits of the code.
    """

    required: ClassVar[tuple[str, ...]] = ("prompt", "test", "entry_point")

    name: str = "code_tests"
    instruction: str = "Complete this function. Answer with the whole function in a ```python block."
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=512))
    limits: Limits = field(default_factory=Limits)

    def question(self, row: Mapping[str, str]) -> str:
        return f"{self.instruction}\n\n```python\n{row['prompt']}```"

    async def grade(self, answer: Answer, row: Mapping[str, str]) -> Graded:
        passed, outcome = await run_tests_async(answer.text, row, self.limits)
        return Graded(passed, answer.truncated, outcome.timed_out)
