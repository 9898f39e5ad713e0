"""Environment of `examples.letters` with a slow tool call per completion."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import chz
from tinker_cookbook.rl.types import Action, ActionExtra, Env, RLDataset, StepResult

from examples.letters import LetterEnv, LetterGroup, Letters, LettersBuilder


@dataclass(frozen=True)
class SlowLetterEnv(LetterEnv):
    """Environment that waits for a tool before it returns the reward."""

    tool_s: float = 0.0

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        await asyncio.sleep(self.tool_s)
        return await super().step(action, extra=extra)


@dataclass(frozen=True)
class SlowLetterGroup(LetterGroup):
    """Group of letter environments that each call a tool of `tool_s` seconds."""

    tool_s: float = 0.0

    async def make_envs(self) -> Sequence[Env]:
        slow = SlowLetterEnv(self.env.renderer, self.env.letter, self.env.num_letters, self.tool_s)
        return [slow] * self.group_size


@chz.chz
class SlowLettersBuilder(LettersBuilder):
    """Builder of groups with a slow tool.

    Attributes:
        tool_s: seconds of the tool call per completion.
    """

    tool_s: float = 0.5

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        letters, _ = await super().__call__()
        assert isinstance(letters, Letters)
        groups = [SlowLetterGroup(group.env, group.group_size, self.tool_s) for group in letters.groups]
        return replace(letters, groups=groups), None
