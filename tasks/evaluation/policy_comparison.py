"""Comparison of two policies on the same prompts; each policy also scores the answers of the other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean

import tinker
from tinker_cookbook.renderers import Message, Renderer

from tasks.common.sampling import Answer, Sampling, sample_answers, score_answers
from tasks.common.service_errors import service_errors
from tasks.common.task import retried_task
from tasks.evaluation.intervals import compare_scores
from tasks.evaluation.policy_metrics import (
    NGRAMS,
    Estimate,
    distinct,
    estimate,
    kl_per_answer,
    kl_per_token,
    ratio_scores,
    vendi,
)
from tasks.preference.judges import Judge, record_verdicts

Row = Mapping[str, str]
Policies = tuple[tinker.SamplingClient, tinker.SamplingClient]
# Logprobs of the tokens of answers under a policy.
Score = Callable[[tinker.SamplingClient, Sequence[Answer]], Awaitable[list[list[float]]]]
# Names of the two policies in metrics.
NAMES = ("checkpoint", "against")


@dataclass(frozen=True, slots=True)
class PolicyComparison:
    """Result of a comparison.

    Attributes:
        metrics: metrics by `<key>/<policy name>`, differences of scores and win rates by `difference/<key>`, and the
            metrics of a prompted judge.
        rows: the same metrics as rows: key, value of the checkpoint, value of the policy that it is compared against. A
            metric of the pair, such as a difference, is in the checkpoint's column.
        samples: prompt, sample index, both answers and the judge's verdict, which is None without a judge.
    """

    metrics: dict[str, float]
    rows: list[tuple[str, float | None, float | None]]
    samples: list[tuple[str, int, str, str, float | None]]


@retried_task(name="compare")
async def compare_policies(
    policies: Policies,
    rows: Sequence[Row],
    renderer: Renderer,
    sampling: Sampling,
    judge: Judge | None,
    can_score_last_n: bool = False,
) -> PolicyComparison:
    """Sample from both policies, score all answers with both, and judge each pair of answers.

    Args:
        can_score_last_n: True if the service can score answers without their prompts (`supports_last_n`).
    """
    score = partial(score_answers, can_score_last_n=can_score_last_n)
    with service_errors("sample from the compared policies"):
        conversations = [[Message(role="user", content=row["question"])] for row in rows]
        answers_PG, others_PG = [await sample_answers(policy, renderer, conversations, sampling) for policy in policies]
        values, entropies = await _kl_and_entropy(policies, answers_PG, others_PG, score)
        nlls = await _reference_scores(policies, renderer, rows, score)
    scores_by_policy = [
        entropies[index] | nlls[index] | _by_question(answers) for index, answers in enumerate((answers_PG, others_PG))
    ]
    for name, answers, scores in zip(NAMES, (answers_PG, others_PG), scores_by_policy, strict=True):
        values |= {(f"distinct_{n}", name): _distinct(n, answers) for n in NGRAMS}
        values |= {(key, name): estimate(scores_P).mean for key, scores_P in scores.items()}
        if "nll_per_token" in scores:
            values[("perplexity", name)] = math.exp(values[("nll_per_token", name)])
    pair_metrics: dict[str, float] = {}
    for key, scores_P in scores_by_policy[0].items():
        differences = [a - b for a, b in zip(scores_P, scores_by_policy[1][key], strict=True)]
        pair_metrics |= compare_scores(differences).metrics(key)
    with record_verdicts() as record:
        verdicts_PG = await _verdicts(judge, rows, answers_PG, others_PG) if judge else []
    if judge:
        wins = estimate([sum(verdicts) / len(verdicts) for verdicts in verdicts_PG])
        values |= {("win_rate", "checkpoint"): wins.mean, ("win_rate", "against"): 1 - wins.mean}
        values |= {("win_rate_stderr", name): wins.error for name in NAMES}
        difference = compare_scores([2 * sum(verdicts) / len(verdicts) - 1 for verdicts in verdicts_PG])
        pair_metrics |= difference.metrics("win_rate") | record.metrics()
    values = {key: value for key, value in values.items() if math.isfinite(value)}
    keys = [key for key, _ in values]
    return PolicyComparison(
        {f"{key}/{name}": value for (key, name), value in values.items()} | pair_metrics,
        [
            *((key, values.get((key, NAMES[0])), values.get((key, NAMES[1]))) for key in dict.fromkeys(keys)),
            *((key, value, None) for key, value in pair_metrics.items()),
        ],
        _samples(rows, answers_PG, others_PG, verdicts_PG),
    )


async def _kl_and_entropy(
    policies: Policies,
    answers_PG: Sequence[Sequence[Answer]],
    others_PG: Sequence[Sequence[Answer]],
    score: Score,
) -> tuple[dict[tuple[str, str], float], list[dict[str, list[float]]]]:
    """Return each policy's KL to the other one, and its entropy by question, on its own answers."""
    values: dict[tuple[str, str], float] = {}
    entropies: list[dict[str, list[float]]] = []
    for name, own, other, own_PG in (
        (NAMES[0], policies[0], policies[1], answers_PG),
        (NAMES[1], policies[1], policies[0], others_PG),
    ):
        flat = [answer for answer in chain(*own_PG) if answer.tokens]
        own_D, other_D = await asyncio.gather(score(own, flat), score(other, flat))
        problems = [p for p, answers_G in enumerate(own_PG) for answer in answers_G if answer.tokens]
        per_token, per_answer = kl_per_token(own_D, other_D, problems), kl_per_answer(own_D, other_D, problems)
        values |= _with_error("kl_per_token", name, per_token) | _with_error("kl_per_answer", name, per_answer)
        entropies.append({"entropy_per_token": _nll_scores(own_D, problems, len(own_PG))})
    return values, entropies


async def _reference_scores(
    policies: Policies, renderer: Renderer, rows: Sequence[Row], score: Score
) -> list[dict[str, list[float]]]:
    """Return a score for each reference answer under each policy, whose mean is the NLL per token.

    Empty dicts without reference answers.
    """
    references = [_reference_answer(renderer, row) for row in rows if row.get("answer")]
    if not references:
        return [{} for _ in policies]
    problems = range(len(references))
    return [
        {"nll_per_token": _nll_scores(await score(policy, references), problems, len(references))}
        for policy in policies
    ]


def _nll_scores(logprobs_D: Sequence[Sequence[float]], problems_D: Sequence[int], num_problems: int) -> list[float]:
    """Return scores by problem whose mean is the negative logprob per token of all answers."""
    sums_D, sizes_D = [-sum(logprobs) for logprobs in logprobs_D], [len(logprobs) for logprobs in logprobs_D]
    return ratio_scores(sums_D, sizes_D, problems_D, num_problems)


def _reference_answer(renderer: Renderer, row: Row) -> Answer:
    """Reference answer of a row, tokenized after the row's prompt."""
    question = [Message(role="user", content=row["question"])]
    tokens, weights = renderer.build_supervised_example([*question, Message(role="assistant", content=row["answer"])])
    ids, num_prompt = tokens.to_ints(), int((weights != 0).nonzero()[0])
    return Answer(tuple(ids[:num_prompt]), tuple(ids[num_prompt:]), row["answer"], False)


def _distinct(n: int, answers_PG: Sequence[Sequence[Answer]]) -> float:
    return distinct(n, [answer.text for answer in chain(*answers_PG)])


def _by_question(answers_PG: Sequence[Sequence[Answer]]) -> dict[str, list[float]]:
    """Return the scores by question that need no logprobs: Vendi score, tokens and share of truncated answers."""
    scores: dict[str, list[float]] = {}
    if len(answers_PG[0]) > 1:
        scores["vendi"] = [vendi([answer.text for answer in answers_G]) for answers_G in answers_PG]
    scores["tokens"] = [fmean(len(answer.tokens) for answer in answers_G) for answers_G in answers_PG]
    scores["truncated"] = [fmean(answer.truncated for answer in answers_G) for answers_G in answers_PG]
    return scores


async def _verdicts(
    judge: Judge, rows: Sequence[Row], answers_PG: Sequence[Sequence[Answer]], others_PG: Sequence[Sequence[Answer]]
) -> list[list[float]]:
    return [
        list(
            await asyncio.gather(
                *(judge(row, answer.text, other.text) for answer, other in zip(answers_G, others_G, strict=True))
            )
        )
        for row, answers_G, others_G in zip(rows, answers_PG, others_PG, strict=True)
    ]


def _samples(
    rows: Sequence[Row],
    answers_PG: Sequence[Sequence[Answer]],
    others_PG: Sequence[Sequence[Answer]],
    verdicts_PG: Sequence[Sequence[float]],
) -> list[tuple[str, int, str, str, float | None]]:
    return [
        (row["question"], g, answer.text, other.text, verdicts_PG[p][g] if verdicts_PG else None)
        for p, (row, answers_G, others_G) in enumerate(zip(rows, answers_PG, others_PG, strict=True))
        for g, (answer, other) in enumerate(zip(answers_G, others_G, strict=True))
    ]


def _with_error(key: str, name: str, value: Estimate) -> dict[tuple[str, str], float]:
    return {(key, name): value.mean, (f"{key}_stderr", name): value.error}
