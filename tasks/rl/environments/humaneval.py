"""HumanEval, or any functions with unit tests, from JSONL files; answers run in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import chz
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.rl.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.types import RLDataset

from tasks.common.jsonl import read_rows
from tasks.rl.environments.groups import GroupsBuilder, MakeEnv
from tasks.sandbox.code_tests import run_tests_async
from tasks.sandbox.runner import Limits

INSTRUCTION = "Complete this function. Answer with the whole function in a ```python block."


@dataclass(frozen=True)
class HumanEvalEnv(MessageEnv):
    """One function: reward 1 if its unit tests pass, minus `format_coef` without a fenced code block."""

    row: Mapping[str, str]
    instruction: str
    limits: Limits
    format_coef: float

    async def initial_observation(self) -> list[Message]:
        return [Message(role="user", content=f"{self.instruction}\n\n```python\n{self.row['prompt']}```")]

    async def step(self, message: Message) -> MessageStepResult:
        text = get_text_content(message)
        passed, outcome = await run_tests_async(text, self.row, self.limits)
        fenced = "```" in text
        return MessageStepResult(
            reward=passed - self.format_coef * (not fenced),
            episode_done=True,
            next_messages=[],
            metrics={"correct": float(passed), "format": float(fenced), "timed_out": float(outcome.timed_out)},
        )


@chz.chz
class HumanEvalBuilder(GroupsBuilder):
    """Builder of one environment per function, from JSONL files with `prompt`, `test` and `entry_point`.

    Attributes:
        train_path: training functions.
        test_path: held-out functions; None for no held-out groups.
        limit: maximum number of functions per file, taken from its start.
        instruction: instruction that precedes each function.
        limits: resource limits of the code, the fields of `tasks.sandbox.runner.Limits`.
        format_coef: penalty for answers without a fenced code block and for truncated answers.
    """

    train_path: str
    test_path: str | None = None
    limit: int | None = None
    instruction: str = INSTRUCTION
    limits: Mapping[str, Any] = chz.field(default_factory=dict)
    format_coef: float = 0.1

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        test = self._problems(self.test_path) if self.test_path else []
        return self.training(self._problems(self.train_path), "humaneval"), self.held_out(test, "humaneval")

    def _problems(self, path: str) -> list[MakeEnv]:
        renderer, limits = self.renderer(), Limits(**self.limits)
        return [
            partial(
                EnvFromMessageEnv,
                renderer,
                HumanEvalEnv(row, self.instruction, limits, self.format_coef),
                failed_parse_reward=-self.format_coef,
                context_overflow_reward=-self.format_coef,
            )
            for row in read_rows(path, ("prompt", "test", "entry_point"), self.limit)
        ]
