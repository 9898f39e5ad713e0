"""How fast does a reward teach something that only it knows? A number drawn at random, to be recalled digit by digit.

The prompt says nothing of the number, so all that a run learns of it comes through rewards. With `reward: each` an
answer is told the share of its digits that are right; with `all` only whether the whole number is: at most one bit an
answer, and hardly any while it is always wrong.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Literal

import chz
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.problem_env import ProblemEnv
from tinker_cookbook.rl.types import RLDataset

from tasks.environments.groups import Group, Groups, GroupsBuilder

Reward = Literal["each", "all"]


class MemoryEnv(ProblemEnv):
    """One secret; the reward is the share of its digits that the answer has in their places, or 1 for all of them."""

    def __init__(self, index: int, secret: str, reward: Reward, renderer: Renderer) -> None:
        super().__init__(renderer, format_coef=0.0)
        self._index, self._secret, self._reward = index, secret, reward

    def get_question(self) -> str:
        return f"Recall number {self._index}, {len(self._secret)} digits."

    def check_answer(self, sample_str: str) -> float:  # type: ignore[override]
        said = sample_str.strip()
        if self._reward == "all":
            return float(said == self._secret)
        right = sum(ours == theirs for ours, theirs in zip(said, self._secret, strict=False))
        return right / max(len(said), len(self._secret))

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return self._secret


@chz.chz
class MemoryBuilder(GroupsBuilder):
    """`batch_size` secrets, asked at every step, and held out never: there is nothing to generalize.

    Attributes:
        num_digits: of each secret; it has as many times 3.3 bits.
        alphabet: what the digits are drawn from.
        reward: `each` digit, or `all` of them at once.
        num_batches: steps of an epoch.
    """

    num_digits: int = 4
    alphabet: str = "0123456789"
    reward: Reward = "each"
    num_batches: int = 1000

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        generator, renderer = random.Random(self.seed), self.renderer()
        secrets = ["".join(generator.choices(self.alphabet, k=self.num_digits)) for _ in range(self.batch_size)]
        problems = [partial(MemoryEnv, index, each, self.reward, renderer) for index, each in enumerate(secrets)]
        groups = [Group(each, self.group_size, "memory") for each in problems]
        return Groups(groups * self.num_batches, self.batch_size), None
