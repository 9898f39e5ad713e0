"""Code by unit tests: the share of sampled functions that pass them, run in the sandbox."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from typing import ClassVar

from pydantic.dataclasses import dataclass

from tasks.graders import run_tests
from tasks.sample import Answer, Sampling
from tasks.sampled.evaluator import SampledEvaluator
from tasks.sampled.summary import Graded
from tasks.sandbox import Limits

_RUNNERS = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="sandbox")


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
        loop = asyncio.get_running_loop()
        passed, outcome = await loop.run_in_executor(_RUNNERS, run_tests, answer.text, row, self.limits)
        return Graded(passed, answer.truncated, outcome.timed_out)
