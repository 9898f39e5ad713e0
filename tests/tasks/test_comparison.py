"""Figures of a comparison against the truth, where it is known, and judges of every kind."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.preference.types import Comparison, PreferenceModel, PreferenceModelBuilder
from tinker_cookbook.renderers import Message, get_text_content

from blocks.errors import ConfigError
from tasks.comparison import distinct, entropy_per_token, kl_per_answer, kl_per_token, vendi
from tasks.judges import build_judge, by_answer

ROW = {"question": "2 + 2?", "answer": "#### 4"}


def test_sampled_kl_and_entropy_come_to_the_exact_ones() -> None:
    """Answers of three independent tokens of two known distributions, in both directions."""
    generator = np.random.default_rng(0)
    policies = np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    for own, other in (policies, policies[::-1]):
        exact = float((own * np.log(own / other)).sum())
        tokens = generator.choice(3, size=(4000, 3), p=own)
        own_D, other_D = np.log(own)[tokens].tolist(), np.log(other)[tokens].tolist()
        for found, truth in ((kl_per_token(own_D, other_D), exact), (kl_per_answer(own_D, other_D), 3 * exact)):
            assert 0 < found.error < 0.1 * truth
            assert abs(found.mean - truth) < 5 * found.error
        assert entropy_per_token(own_D) == pytest.approx(-float((own * np.log(own)).sum()), rel=0.05)


def test_diversity_counts() -> None:
    same, different = ["the cat sat"] * 4, ["a b", "c d", "e f", "g h"]
    assert (distinct(1, same), distinct(1, different)) == (0.25, 1.0)
    assert (vendi(same), vendi(different)) == (pytest.approx(1.0), pytest.approx(4.0))
    assert 1.0 < vendi(["the cat sat", "the cat ran"]) < 2.0
    assert vendi(["", ""]) == pytest.approx(1.0)
    assert distinct(3, ["a b"]) == 0.0


class Longer(PreferenceModel):
    """The longer answer, and a slight liking for whatever comes first."""

    async def __call__(self, comparison: Comparison) -> float:
        first, second = (len(str(each[0]["content"])) for each in (comparison.completion_A, comparison.completion_B))
        return float(np.sign(second - first)) * 0.8 - 0.2


class LongerBuilder(PreferenceModelBuilder):
    def __call__(self) -> PreferenceModel:
        return Longer()


class Asked(MessageCompleter):
    """Says what it is told to, but always A where it is to tell two long answers apart."""

    async def __call__(self, messages: list[Message]) -> Message:
        text = get_text_content(messages[0])
        wins = text.index("good") < text.index("bad") if "good" in text else None
        said = {True: "I think A", False: "**B**", None: "Both are fine"}[wins]
        return Message(role="assistant", content=said)


async def likes_first(row: Any, first: str, second: str) -> float:
    return 1.0


def broken(row: Any, first: str, second: str) -> float:
    return float("nan") if first == second else 7.0


def ask(judge: str, first: str, second: str) -> float:
    return asyncio.run(_ask(judge, first, second))


async def _ask(judge: str, first: str, second: str) -> float:
    return await build_judge(f"{__name__}:{judge}" if ":" not in judge else judge, {})(ROW, first, second)


def test_every_kind_of_judge_says_who_is_better() -> None:
    assert [ask("tasks.judges:by_answer", *pair) for pair in (("4", "5"), ("5", "4"), ("4", "4"), ("a", "b"))] == [
        1.0,
        0.0,
        0.5,
        0.5,
    ]
    assert by_answer(ROW, "It is 4.", "") == 1.0
    for judge in ("Longer", "LongerBuilder"):  # asked in both orders, so that no place is favoured
        assert [ask(judge, *pair) for pair in (("long", "a"), ("a", "long"), ("a", "b"))] == pytest.approx(
            [0.9, 0.1, 0.5]
        )
    assert [ask("Asked", *pair) for pair in (("good", "bad"), ("bad", "good"), ("x", "y"))] == [1.0, 0.0, 0.5]
    assert ask("likes_first", "x", "y") == 1.0


def test_a_judge_that_is_none_is_told() -> None:
    for judge, expected in (
        ("nothing", "cannot be imported"),
        ("ROW", "is a dict, where a function"),
        ("broken", r"said 7\.0, where a number from 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=expected):
            ask(judge, "x", "y")
    with pytest.raises(ConfigError, match="said nan"):
        ask("broken", "x", "x")
    assert math.isnan(broken(None, "x", "x"))
