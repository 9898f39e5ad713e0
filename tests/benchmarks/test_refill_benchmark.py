"""The benchmark of refills: its rewards by enumeration, and the reward at a number of tokens."""

from __future__ import annotations

from itertools import product
from statistics import fmean

import pytest
from mlflow.entities import Metric

from benchmarks.refill import reward_at
from benchmarks.token_classes import NUM_CLASSES, NUM_LENGTHS, is_right


def test_problems_have_four_difficulties() -> None:
    """A model that knows nothing has the reward 4 to the power of minus the required length."""
    completions = list(product(range(NUM_CLASSES), repeat=NUM_LENGTHS))
    for problem in range(NUM_CLASSES * NUM_LENGTHS):
        share = fmean(is_right(problem, tokens) for tokens in completions)
        assert share == 0.25 ** (1 + problem // NUM_CLASSES)
    assert is_right(NUM_CLASSES, [0]) == 0.0, "a completion that ends too early"


def test_reward_is_interpolated_by_sampled_tokens() -> None:
    def points(values: dict[int, float]) -> list[Metric]:
        return [Metric("key", value, 0, step) for step, value in values.items()]

    tokens, rewards = points({0: 100.0, 1: 300.0, 2: 200.0, 3: 400.0}), points({0: 0.0, 2: 0.4, 4: 0.6})
    # 400 tokens were sampled before the second evaluation, and 1,000 before the third.
    assert reward_at(400, tokens, rewards) == pytest.approx(0.4)
    assert reward_at(700, tokens, rewards) == pytest.approx(0.5)
