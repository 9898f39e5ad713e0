"""Groups of rollouts on one problem, the dataset of such groups, and the base class of the dataset's builders."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import chz
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

MakeEnv = Callable[[], Env]


@dataclass(frozen=True)
class Group(EnvGroupBuilder):
    """Builder of a group of rollouts on one problem.

    Attributes:
        make: factory of the problem's environment.
        size: number of rollouts.
        tag: tag of the group's metrics.
    """

    make: MakeEnv
    size: int
    tag: str

    async def make_envs(self) -> Sequence[Env]:
        return [self.make() for _ in range(self.size)]

    def logging_tags(self) -> list[str]:
        return [self.tag]


@dataclass(frozen=True)
class Groups(RLDataset):
    """Groups in batches, in order; an incomplete last batch is dropped."""

    groups: Sequence[EnvGroupBuilder]
    batch_size: int

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return self.groups[index * self.batch_size : (index + 1) * self.batch_size]

    def __len__(self) -> int:
        return len(self.groups) // self.batch_size


@chz.chz
class GroupsBuilder(RLDatasetBuilder):
    """Base class of dataset builders.

    Attributes:
        model_name_for_tokenizer: filled in by the run.
        renderer_name: tinker-cookbook renderer of the model's chat format; the run fills in the model's own by default.
        batch_size: problems per step.
        group_size: rollouts per problem.
        seed: seed of the order of the problems.
    """

    model_name_for_tokenizer: str
    renderer_name: str
    batch_size: int
    group_size: int
    seed: int = 0

    def renderer(self) -> Renderer:
        return get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer))

    def training(self, problems: Sequence[MakeEnv], tag: str) -> Groups:
        """Training dataset of the problems, shuffled by the seed."""
        shuffled = random.Random(self.seed).sample(problems, len(problems))
        groups = [Group(problem, self.group_size, tag) for problem in shuffled]
        return Groups(groups, self.batch_size)

    def held_out(self, problems: Sequence[MakeEnv], tag: str) -> Groups | None:
        """Test dataset: one batch with one rollout per problem; None without problems."""
        groups = [Group(problem, 1, tag) for problem in problems]
        return Groups(groups, len(groups)) if groups else None
