"""Two policies asked the same questions, each one's answers scored by both."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import tinker
from tinker_cookbook.renderers import Message, Renderer

from tasks.comparison import (
    NGRAMS,
    Estimate,
    distinct,
    entropy_per_token,
    estimate,
    kl_per_answer,
    kl_per_token,
    perplexity,
    vendi,
)
from tasks.judges import Judge
from tasks.options import retried_task
from tasks.sample import Answer, Sampling, sample_answers, score_answers
from tasks.service_errors import service_errors

Row = Mapping[str, str]
Policies = tuple[tinker.SamplingClient, tinker.SamplingClient]
# The names of the two, in metrics.
NAMES = ("checkpoint", "against")


@dataclass(frozen=True, slots=True)
class Compared:
    """What a comparison found.

    Attributes:
        metrics: every figure by its name; those of one policy end with its name.
        rows: the same side by side: a figure's name, and its value for the checkpoint and what it is compared with.
        samples: per question and sample, both answers and the verdict.
    """

    metrics: dict[str, float]
    rows: list[tuple[str, float | None, float | None]]
    samples: list[tuple[str, int, str, str, float | None]]


@retried_task(name="compare")
async def compare_policies(
    policies: Policies, rows: Sequence[Row], renderer: Renderer, sampling: Sampling, judge: Judge | None
) -> Compared:
    """Sample both, score each one's answers by both, and ask the judge about each pair of answers."""
    with service_errors("sample from the policies that are compared"):
        conversations = [[Message(role="user", content=row["question"])] for row in rows]
        answers_PG, others_PG = [await sample_answers(policy, renderer, conversations, sampling) for policy in policies]
        figures = await _figures(policies, answers_PG, others_PG)
        figures |= await _perplexities(policies, renderer, rows)
    for name, answers in zip(NAMES, (answers_PG, others_PG), strict=True):
        figures |= {(key, name): value for key, value in _diversity(answers).items()}
    verdicts_PG = await _verdicts(judge, rows, answers_PG, others_PG) if judge else []
    if judge:
        wins = estimate([sum(verdicts) / len(verdicts) for verdicts in verdicts_PG])
        figures |= {("win_rate", "checkpoint"): wins.mean, ("win_rate", "against"): 1 - wins.mean}
        figures |= {("win_rate_stderr", name): wins.error for name in NAMES}
    figures = {key: value for key, value in figures.items() if math.isfinite(value)}
    keys = [key for key, _ in figures]
    return Compared(
        {f"{key}/{name}": value for (key, name), value in figures.items()},
        [(key, figures.get((key, NAMES[0])), figures.get((key, NAMES[1]))) for key in dict.fromkeys(keys)],
        _samples(rows, answers_PG, others_PG, verdicts_PG),
    )


async def _figures(
    policies: Policies, answers_PG: Sequence[Sequence[Answer]], others_PG: Sequence[Sequence[Answer]]
) -> dict[tuple[str, str], float]:
    """KL to the other policy and entropy of each, on its own answers."""
    figures: dict[tuple[str, str], float] = {}
    for name, own, other, sampled in (
        (NAMES[0], policies[0], policies[1], answers_PG),
        (NAMES[1], policies[1], policies[0], others_PG),
    ):
        flat = [answer for answer in chain(*sampled) if answer.tokens]
        own_D, other_D = await asyncio.gather(score_answers(own, flat), score_answers(other, flat))
        per_token, per_answer = kl_per_token(own_D, other_D), kl_per_answer(own_D, other_D)
        figures |= _with_error("kl_per_token", name, per_token) | _with_error("kl_per_answer", name, per_answer)
        figures[("entropy_per_token", name)] = entropy_per_token(own_D)
    return figures


async def _perplexities(policies: Policies, renderer: Renderer, rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Of the rows' own answers, where they have some."""
    given = [_given(renderer, row) for row in rows if row.get("answer")]
    if not given:
        return {}
    return {
        ("perplexity", name): perplexity(await score_answers(policy, given))
        for name, policy in zip(NAMES, policies, strict=True)
    }


def _given(renderer: Renderer, row: Row) -> Answer:
    """The answer that a row has, after its question as it is asked."""
    question = [Message(role="user", content=row["question"])]
    tokens, weights = renderer.build_supervised_example([*question, Message(role="assistant", content=row["answer"])])
    ids, num_prompt = tokens.to_ints(), int((weights != 0).nonzero()[0])
    return Answer(tuple(ids[:num_prompt]), tuple(ids[num_prompt:]), row["answer"], False)


def _diversity(answers_PG: Sequence[Sequence[Answer]]) -> dict[str, float]:
    texts_PG = [[answer.text for answer in answers_G] for answers_G in answers_PG]
    every = list(chain(*answers_PG))
    figures = {f"distinct_{n}": distinct(n, list(chain(*texts_PG))) for n in NGRAMS}
    if len(texts_PG[0]) > 1:
        figures["vendi"] = estimate([vendi(texts_G) for texts_G in texts_PG]).mean
    figures["tokens"] = estimate([len(answer.tokens) for answer in every]).mean
    figures["truncated"] = estimate([float(answer.truncated) for answer in every]).mean
    return figures


async def _verdicts(
    judge: Judge, rows: Sequence[Row], answers_PG: Sequence[Sequence[Answer]], others_PG: Sequence[Sequence[Answer]]
) -> list[list[float]]:
    return [
        list(
            await asyncio.gather(
                *(judge(row, mine.text, theirs.text) for mine, theirs in zip(answers_G, others_G, strict=True))
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
        (row["question"], g, mine.text, theirs.text, verdicts_PG[p][g] if verdicts_PG else None)
        for p, (row, answers_G, others_G) in enumerate(zip(rows, answers_PG, others_PG, strict=True))
        for g, (mine, theirs) in enumerate(zip(answers_G, others_G, strict=True))
    ]


def _with_error(key: str, name: str, found: Estimate) -> dict[tuple[str, str], float]:
    return {(key, name): found.mean, (f"{key}_stderr", name): found.error}
