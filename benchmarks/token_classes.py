"""Environment whose problems ask for 1 to 4 tokens of one class (the number of the token modulo 4); rewards 0 and 1."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import chz
import tinker
from tinker import types
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl.types import Action, ActionExtra, Env, RLDataset, RLDatasetBuilder, StepResult

from tasks.rl.environments.groups import Group, Groups

NUM_CLASSES, NUM_LENGTHS = 4, 4


@dataclass(frozen=True)
class ClassEnv(Env):
    """Problem whose completion must start with a given number of tokens (1 to 4) of a given class."""

    problem: int

    async def initial_observation(self) -> tuple[types.ModelInput, StopCondition]:
        return types.ModelInput.from_ints(list(f"Q{chr(ord('a') + self.problem)}:".encode())), []

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        return StepResult(is_right(self.problem, action), True, tinker.ModelInput.empty(), [])


def is_right(problem: int, tokens: Sequence[int]) -> float:
    """Return 1 if the first `1 + problem // 4` tokens have the class `problem % 4`, else 0.

    >>> is_right(1, [5, 9]), is_right(1, [4, 5]), is_right(5, [5, 9]), is_right(5, [5, 4])
    (1.0, 0.0, 1.0, 0.0)
    """
    length, wanted = divmod(problem, NUM_CLASSES)
    first = tokens[: length + 1]
    return float(len(first) == length + 1 and all(token % NUM_CLASSES == wanted for token in first))


@chz.chz
class ClassesBuilder(RLDatasetBuilder):
    """Builder of groups of all problems, in a new order in each epoch; the test groups have the same problems.

    Attributes:
        groups_per_batch: groups per step.
        group_size: completions per group.
        num_epochs: epochs in the dataset.
        test_size: completions per test group.
        seed: seed of the orders.
    """

    groups_per_batch: int
    group_size: int
    num_epochs: int
    test_size: int
    seed: int

    async def __call__(self) -> tuple[RLDataset, RLDataset]:
        generator, problems = random.Random(self.seed), range(NUM_CLASSES * NUM_LENGTHS)
        order = [problem for _ in range(self.num_epochs) for problem in generator.sample(problems, len(problems))]
        train = [_group(problem, self.group_size) for problem in order]
        test = [_group(problem, self.test_size) for problem in problems]
        return Groups(train, self.groups_per_batch), Groups(test, len(test))


def _group(problem: int, size: int) -> Group:
    return Group(partial(ClassEnv, problem), size, f"length_{1 + problem // NUM_CLASSES}")
