"""HumanEval, or any functions with unit tests, from JSONL files; what is answered runs in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import chz
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.rl.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.types import RLDataset

from tasks.code_runs import run_tests_apart
from tasks.environments.groups import GroupsBuilder, MakeEnv
from tasks.rows import read_rows
from tasks.sandbox import Limits

INSTRUCTION = "Complete this function. Answer with the whole function in a ```python block."


@dataclass(frozen=True)
class HumanEvalEnv(MessageEnv):
    """One function: 1 where its unit tests pass, less `format_coef` where the answer has no fenced block."""

    row: Mapping[str, str]
    instruction: str
    limits: Limits
    format_coef: float

    async def initial_observation(self) -> list[Message]:
        return [Message(role="user", content=f"{self.instruction}\n\n```python\n{self.row['prompt']}```")]

    async def step(self, message: Message) -> MessageStepResult:
        text = get_text_content(message)
        passed, outcome = await run_tests_apart(text, self.row, self.limits)
        fenced = "```" in text
        return MessageStepResult(
            reward=passed - self.format_coef * (not fenced),
            episode_done=True,
            next_messages=[],
            metrics={"correct": float(passed), "format": float(fenced), "timed_out": float(outcome.timed_out)},
        )


@chz.chz
class HumanEvalBuilder(GroupsBuilder):
    """The functions of JSONL files with `prompt`, `test` and `entry_point`.

    Attributes:
        train_path: what is trained on.
        test_path: what is held out; None for nothing.
        limit: take so many functions of each file only, the first ones.
        instruction: what each function is asked with.
        limits: what the code may use, the fields of `tasks.sandbox.Limits`.
        format_coef: what an answer loses without a fenced block, or without an end.
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
