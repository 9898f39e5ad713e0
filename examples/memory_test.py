"""Memory test: how fast does a run learn a random number from rewards alone?

The prompt does not contain the number, so the reward is the only source of information. With `reward: each`, the reward
is the share of correct digits. With `all`, it only says whether the whole number is correct: at most one bit per
completion, and almost nothing while the completions are always wrong.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Literal

import chz
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.problem_env import ProblemEnv
from tinker_cookbook.rl.types import RLDataset

from tinker_flows import Group, Groups, GroupsBuilder

Reward = Literal["each", "all"]


class MemoryEnv(ProblemEnv):
    """Environment of one secret; the reward is the share of correct digits, or 1 only for the whole number."""

    def __init__(self, index: int, secret: str, reward: Reward, renderer: Renderer) -> None:
        super().__init__(renderer, format_coef=0.0)
        self._index, self._secret, self._reward = index, secret, reward

    def get_question(self) -> str:
        return f"Recall number {self._index}, {len(self._secret)} digits."

    def check_answer(self, sample_str: str) -> float:  # type: ignore[override]
        completion = sample_str.strip()
        if self._reward == "all":
            return float(completion == self._secret)
        num_correct = sum(ours == digit for ours, digit in zip(completion, self._secret, strict=False))
        return num_correct / max(len(completion), len(self._secret))

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return self._secret


@chz.chz
class MemoryBuilder(GroupsBuilder):
    """Builder of `batch_size` secrets that are prompted at every step; there is no test set, as nothing generalizes.

    Attributes:
        num_digits: digits per secret; each digit has 3.3 bits.
        alphabet: characters of the digits.
        reward: `each` for the share of correct digits, `all` for the whole number.
        num_batches: steps per epoch.
    """

    num_digits: int = 4
    alphabet: str = "0123456789"
    reward: Reward = "each"
    num_batches: int = 1000

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        generator, renderer = random.Random(self.seed), self.renderer()
        secrets = ["".join(generator.choices(self.alphabet, k=self.num_digits)) for _ in range(self.batch_size)]
        problems = [partial(MemoryEnv, index, secret, self.reward, renderer) for index, secret in enumerate(secrets)]
        groups = [Group(problem, self.group_size, "memory") for problem in problems]
        return Groups(groups * self.num_batches, self.batch_size), None
