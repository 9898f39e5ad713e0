"""Metrics of a policy comparison against exact values, and all kinds of judges."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import bootstrap, sem
from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.preference.types import Comparison, PreferenceModel, PreferenceModelBuilder
from tinker_cookbook.renderers import Message, get_text_content

from blocks.errors import ConfigError
from tasks.evaluation.intervals import compare_scores
from tasks.evaluation.policy_metrics import (
    clustered,
    distinct,
    entropy_per_token,
    kl_per_answer,
    kl_per_token,
    ratio_scores,
    vendi,
)
from tasks.preference.judges import build_judge, by_answer

ROW = {"question": "2 + 2?", "answer": "#### 4"}


def test_sampled_kl_and_entropy_converge_to_the_exact_values() -> None:
    """Answers of three independent tokens of two known distributions, in both directions."""
    generator = np.random.default_rng(0)
    policies = np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    for own, other in (policies, policies[::-1]):
        exact = float((own * np.log(own / other)).sum())
        tokens = generator.choice(3, size=(4000, 3), p=own)
        own_D, other_D = np.log(own)[tokens].tolist(), np.log(other)[tokens].tolist()
        problems_D = list(range(4000))
        per_token, per_answer = (of(own_D, other_D, problems_D) for of in (kl_per_token, kl_per_answer))
        for estimate, truth in ((per_token, exact), (per_answer, 3 * exact)):
            assert 0 < estimate.error < 0.1 * truth
            assert abs(estimate.mean - truth) < 5 * estimate.error
        sums_D = [-sum(own) for own in own_D]
        entropy = np.mean(ratio_scores(sums_D, [3.0] * 4000, problems_D, 4000))
        assert entropy == pytest.approx(entropy_per_token(own_D))
        assert entropy == pytest.approx(-float((own * np.log(own)).sum()), rel=0.05)


def test_errors_cover_answers_that_are_alike() -> None:
    """Repeating each answer ten times adds nothing: the error stays, and covers the truth in 95 % of cases."""
    generator, num_covered = np.random.default_rng(0), 0
    for _ in range(400):
        values_P = generator.normal(1.0, 0.5, 40)
        repeated = clustered([*np.repeat(values_P, 10)], [1.0] * 400, [*np.repeat(range(40), 10)])
        assert repeated.error == pytest.approx(float(sem(values_P)))
        num_covered += abs(repeated.mean - 1.0) <= 1.96 * repeated.error
    assert 0.91 < num_covered / 400 < 0.98


def test_error_of_a_ratio_is_that_of_the_jackknife() -> None:
    """Answers of different lengths in clusters of different sizes."""
    generator = np.random.default_rng(1)
    problems_D = generator.integers(0, 60, 500)
    sizes_D = generator.integers(1, 30, 500).astype(float)
    sums_D = sizes_D * generator.normal(0.2, 0.1, 500) + generator.normal(0, 1, 60)[problems_D]
    left_out = [sums_D[problems_D != p].sum() / sizes_D[problems_D != p].sum() for p in range(60)]
    jackknife = math.sqrt(59 / 60 * float(((np.array(left_out) - np.mean(left_out)) ** 2).sum()))
    ratio = clustered([*sums_D], [*sizes_D], [*problems_D])
    assert ratio.mean == pytest.approx(float(sums_D.sum() / sizes_D.sum()))
    assert ratio.error == pytest.approx(jackknife, rel=0.03)


def test_difference_of_ratios_agrees_with_the_bootstrap_over_problems() -> None:
    """Two policies whose answers to a problem are alike; one problem has no answer of the second policy."""
    generator = np.random.default_rng(2)
    common_P = generator.normal(1, 0.3, 80)
    problems_D = generator.integers(0, 80, 400)
    totals: list[Any] = []
    for kept, shift in ((problems_D, 0.0), (problems_D[problems_D != 7], 0.05)):
        sizes_D = generator.integers(1, 30, len(kept)).astype(float)
        sums_D = sizes_D * (common_P[kept] + shift + generator.normal(0, 0.2, len(kept)))
        totals.append((sums_D, sizes_D, kept))
    scores = [ratio_scores([*sums], [*sizes], [*kept], 80) for sums, sizes, kept in totals]
    by_problem = [np.bincount(kept, values, 80) for sums, sizes, kept in totals for values in (sums, sizes)]

    def difference(sums: Any, sizes: Any, other_sums: Any, other_sizes: Any, axis: int) -> Any:
        return sums.sum(axis) / sizes.sum(axis) - other_sums.sum(axis) / other_sizes.sum(axis)

    result = compare_scores([a - b for a, b in zip(*scores, strict=True)])
    assert result.mean == pytest.approx(difference(*by_problem, axis=0))
    truth = bootstrap(by_problem, difference, paired=True, method="basic", rng=np.random.default_rng(0))
    assert result.interval is not None
    width = result.interval.high - result.interval.low
    expected = truth.confidence_interval.high - truth.confidence_interval.low
    assert width == pytest.approx(expected, rel=0.1)
    unpaired = math.hypot(*(float(sem(scores_P)) for scores_P in scores))
    assert width < 0.8 * 2 * 1.99 * unpaired, "answers to the same problem are alike"


def test_diversity_metrics() -> None:
    same, different = ["the cat sat"] * 4, ["a b", "c d", "e f", "g h"]
    assert (distinct(1, same), distinct(1, different)) == (0.25, 1.0)
    assert (vendi(same), vendi(different)) == (pytest.approx(1.0), pytest.approx(4.0))
    assert 1.0 < vendi(["the cat sat", "the cat ran"]) < 2.0
    assert vendi(["", ""]) == pytest.approx(1.0)
    # Two answers without a common word have exactly the score 2, whatever their lengths.
    assert {vendi([f"a{n} x y", "b c d e f g"[: 2 * n + 1]]) for n in range(6)} == {2.0}
    # Two answers without a common word have exactly the score 2, whatever their lengths.
    assert {vendi([f"a{n} x y", "b c d e f g"[: 2 * n + 1]]) for n in range(6)} == {2.0}
    assert math.isnan(distinct(3, ["a b"])), "there are no 3-grams of which a share could be distinct"


class Longer(PreferenceModel):
    """Prefers the longer answer, with a slight bias toward the first."""

    async def __call__(self, comparison: Comparison) -> float:
        answers = comparison.completion_A, comparison.completion_B
        first, second = (len(str(answer[0]["content"])) for answer in answers)
        return float(np.sign(second - first)) * 0.8 - 0.2


class LongerBuilder(PreferenceModelBuilder):
    def __call__(self) -> PreferenceModel:
        return Longer()


class GoodOverBad(MessageCompleter):
    """Votes for the answer "good" over "bad", in different wordings, and has no verdict on other answers."""

    async def __call__(self, messages: list[Message]) -> Message:
        text = get_text_content(messages[0]).split("Answer A:")[1]
        wins = text.index("good") < text.index("bad") if "good" in text else None
        reply = {True: "I think A: [[A]]", False: "**[[B]]**", None: "Both are fine"}[wins]
        return Message(role="assistant", content=reply)


async def likes_first(row: Any, first: str, second: str) -> float:
    return 1.0


def broken(row: Any, first: str, second: str) -> float:
    return float("nan") if first == second else 7.0


def verdict(judge: str, first: str, second: str) -> float:
    async def call() -> float:
        return await build_judge(f"{__name__}:{judge}" if ":" not in judge else judge, {})(ROW, first, second)

    return asyncio.run(call())


def test_every_kind_of_judge_returns_its_verdict() -> None:
    pairs = ("4", "5"), ("5", "4"), ("4", "4"), ("a", "b")
    assert [verdict("tasks.preference.judges:by_answer", *pair) for pair in pairs] == [1.0, 0.0, 0.5, 0.5]
    assert by_answer(ROW, "It is 4.", "") == 1.0
    for judge in ("Longer", "LongerBuilder"):  # judged in both orders, which cancels the bias
        verdicts = [verdict(judge, *pair) for pair in (("long", "a"), ("a", "long"), ("a", "b"))]
        assert verdicts == pytest.approx([0.9, 0.1, 0.5])
    pairs = ("good", "bad"), ("bad", "good"), ("x", "y")
    assert [verdict("GoodOverBad", *pair) for pair in pairs] == [1.0, 0.0, 0.5]
    assert verdict("likes_first", "x", "y") == 1.0


def test_invalid_judge_is_rejected() -> None:
    for judge, expected in (
        ("nothing", "cannot be imported"),
        ("ROW", "is a dict: give a function"),
        ("broken", r"returned 7\.0: return a number from 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=expected):
            verdict(judge, "x", "y")
    with pytest.raises(ConfigError, match="returned nan"):
        verdict("broken", "x", "x")
    assert math.isnan(broken(None, "x", "x"))
