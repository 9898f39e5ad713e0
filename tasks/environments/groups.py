"""What the environments of this project share: groups of one problem each, in batches."""

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
    """Several answers to one problem.

    Attributes:
        make: a fresh environment of the problem.
        tag: under which its metrics are logged.
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
    """Groups in batches, in their order; what is left over is no batch."""

    groups: Sequence[EnvGroupBuilder]
    batch_size: int

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return self.groups[index * self.batch_size : (index + 1) * self.batch_size]

    def __len__(self) -> int:
        return len(self.groups) // self.batch_size


@chz.chz
class GroupsBuilder(RLDatasetBuilder):
    """What is the same for all problems.

    Attributes:
        model_name_for_tokenizer: a run fills it in.
        renderer_name: the model's chat format, a renderer of tinker-cookbook; a run fills in one that suits the model.
        batch_size: problems of a step.
        group_size: answers to each.
        seed: of the order of the problems.
    """

    model_name_for_tokenizer: str
    renderer_name: str
    batch_size: int
    group_size: int
    seed: int = 0

    def renderer(self) -> Renderer:
        return get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer))

    def training(self, problems: Sequence[MakeEnv], tag: str) -> Groups:
        """The problems in an order of their own, by the seed."""
        order = random.Random(self.seed).sample(problems, len(problems))
        return Groups([Group(each, self.group_size, tag) for each in order], self.batch_size)

    def held_out(self, problems: Sequence[MakeEnv], tag: str) -> Groups | None:
        """The problems with one answer each, as one batch; None without any."""
        return Groups([Group(each, 1, tag) for each in problems], len(problems)) if problems else None
