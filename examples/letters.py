"""Environment that any model learns in minutes: repeat one letter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import chz
import tinker
from tinker_cookbook import model_info, renderers
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Observation,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer


@dataclass(frozen=True)
class LetterEnv(Env):
    """One prompt. The reward is the number of correct letters divided by the longer of requested and actual length."""

    renderer: Renderer
    letter: str
    num_letters: int

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        messages = [renderers.Message(role="user", content=f"Say {self.letter} {self.num_letters} times.")]
        return self.renderer.build_generation_prompt(messages), self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        completion = str(self.renderer.tokenizer.decode(action))
        return StepResult(
            reward=completion.count(self.letter) / max(self.num_letters, len(completion)),
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=[],
            metrics={"num_letters": completion.count(self.letter)},
        )


@dataclass(frozen=True)
class LetterGroup(EnvGroupBuilder):
    """Group of completions of one prompt."""

    env: LetterEnv
    group_size: int

    async def make_envs(self) -> Sequence[Env]:
        return [self.env] * self.group_size

    def logging_tags(self) -> list[str]:
        return [f"letter_{self.env.letter}"]


@dataclass(frozen=True)
class Letters(RLDataset):
    """Dataset with the same prompts at every step, one per letter."""

    groups: Sequence[LetterGroup]
    num_batches: int

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return self.groups

    def __len__(self) -> int:
        return self.num_batches


@chz.chz
class LettersBuilder(RLDatasetBuilder):
    """Builder of the dataset.

    Attributes:
        letters: letters of the prompts, one prompt per letter.
        num_letters: requested number of repetitions.
        group_size: completions per prompt.
        num_batches: steps per epoch.
    """

    model_name_for_tokenizer: str
    renderer_name: str | None = None
    letters: str = "ae"
    num_letters: int = 8
    group_size: int = 8
    num_batches: int = 1000

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        name = self.renderer_name or model_info.get_recommended_renderer_name(self.model_name_for_tokenizer)
        renderer = renderers.get_renderer(name, get_tokenizer(self.model_name_for_tokenizer))
        groups = [
            LetterGroup(LetterEnv(renderer, letter, self.num_letters), self.group_size) for letter in self.letters
        ]
        return Letters(groups, self.num_batches), Letters(groups, 1)
