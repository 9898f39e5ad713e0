"""The letters of `examples.letters` behind a tool that takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import chz
from tinker_cookbook.rl.types import Action, ActionExtra, Env, RLDataset, StepResult

from examples.letters import LetterEnv, LetterGroup, Letters, LettersBuilder


@dataclass(frozen=True)
class SlowLetterEnv(LetterEnv):
    """Waits for its tool before it gives the reward."""

    tool_s: float = 0.0

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        await asyncio.sleep(self.tool_s)
        return await super().step(action, extra=extra)


@dataclass(frozen=True)
class SlowLetterGroup(LetterGroup):
    tool_s: float = 0.0

    async def make_envs(self) -> Sequence[Env]:
        slow = SlowLetterEnv(self.env.renderer, self.env.letter, self.env.num_letters, self.tool_s)
        return [slow] * self.group_size


@chz.chz
class SlowLettersBuilder(LettersBuilder):
    """Attributes: tool_s: seconds that each answer waits."""

    tool_s: float = 0.5

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        made, _ = await super().__call__()
        assert isinstance(made, Letters)
        groups = [SlowLetterGroup(each.env, each.group_size, self.tool_s) for each in made.groups]
        return replace(made, groups=groups), None
