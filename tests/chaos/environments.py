"""Environments whose grades differ within most groups; servers or this process compute the grades."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import chz
import httpx
import tinker
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Metrics,
    RLDataset,
    StepResult,
    Trajectory,
)

from chaos.graders import grade
from chaos.schedule import GROUPS
from examples.letters import LetterEnv, Letters, LettersBuilder
from tasks.rl.environments.groups import Groups


@dataclass(frozen=True)
class GradedEnv(LetterEnv):
    """Prompt of the letters; the reward is the grade of the completion.

    Attributes:
        url: server of the environment; empty to grade in this process.
    """

    url: str = ""

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        (reward,) = await _grades(self.url, [str(self.renderer.tokenizer.decode(action))])
        return StepResult(reward, True, tinker.ModelInput.empty(), [])


@dataclass(frozen=True)
class GradedGroup(EnvGroupBuilder):
    """Group of completions of one prompt.

    Attributes:
        judge_url: server of the judge, whose grades are added; empty for no judge.
    """

    env: GradedEnv
    group_size: int
    judge_url: str

    async def make_envs(self) -> Sequence[Env]:
        return [self.env] * self.group_size

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        if not self.judge_url:
            return [(0.0, {}) for _ in trajectory_group]
        decode = self.env.renderer.tokenizer.decode
        texts = [str(decode(trajectory.transitions[-1].ac.tokens)) for trajectory in trajectory_group]
        return [(judged, {"judged": judged}) for judged in await _grades(self.judge_url, texts)]

    def logging_tags(self) -> list[str]:
        return [f"letter_{self.env.letter}"]


@chz.chz
class GradedBuilder(LettersBuilder):
    """Builder of the dataset.

    Attributes:
        environment_url: server of the environments; empty to grade in this process.
        judge_url: server of the judge; empty for no judge.
    """

    environment_url: str = ""
    judge_url: str = ""

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        letters, _ = await LettersBuilder.__call__(self)
        assert isinstance(letters, Letters)
        envs = [group.env for group in letters.groups]
        groups = [
            GradedGroup(
                GradedEnv(env.renderer, env.letter, env.num_letters, self.environment_url),
                self.group_size,
                self.judge_url,
            )
            for env in envs
        ]
        return Groups(groups, GROUPS), Groups(groups[: 2 * GROUPS], GROUPS)


async def _grades(url: str, texts: Sequence[str]) -> list[float]:
    if not url:
        return [grade(text) for text in texts]
    async with httpx.AsyncClient(timeout=5, verify=False) as client:
        response = await client.post(url, json=list(texts))
    return response.raise_for_status().json()
