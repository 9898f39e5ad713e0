"""Scores of prompts.

These are the logprobs of the prompt's tokens and, at each position, the likeliest tokens, the logprobs of given target
tokens, and tokens drawn from the distribution of the position.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.compute.base import BaseModel
from engine.compute.logprobs import CHUNK_ELEMENTS, target_logprobs
from engine.sampling.choose import RowSamplingParams, choose_tokens
from engine.sampling.job import NO_LOGPROB, PromptScores, SampleJob, TopTokens


def score_prompts(
    base: BaseModel, hidden_BTH: Tensor, jobs_B: Sequence[SampleJob], starts_B: Sequence[int]
) -> list[PromptScores]:
    """Compute the scores of each prompt from its hidden states, under the active adapter.

    Args:
        hidden_BTH: right-padded hidden states of the prompts from position ``starts_B[b]`` on. The state at position
            ``t`` predicts token ``t + 1``.
        starts_B: position of each prompt's first hidden state in ``hidden_BTH``; at most its `first_needed_position`.
    """
    logprobs_B = _logprobs(base, hidden_BTH, jobs_B, starts_B)
    return [
        _score(base, hidden_TH[: len(job.prompt_T) - 1], job, logprobs_T)
        for hidden_TH, job, logprobs_T in zip(hidden_BTH, jobs_B, logprobs_B, strict=True)
    ]


def first_scored_position(job: SampleJob) -> int:
    """Return the position of the first prompt token to score.

    The last `prompt_logprobs` tokens are scored. If that is 0, the top tokens cover all positions. The position is at
    least 1, because token 0 has no context.
    """
    return max(1, len(job.prompt_T) - (job.prompt_logprobs or len(job.prompt_T)))


def first_needed_position(job: SampleJob) -> int:
    """Return the first prompt position whose hidden state the job needs: the last one if it needs no scores."""
    if job.topk_prompt or job.prompt_draws or job.prompt_targets is not None:
        return 0
    return first_scored_position(job) - 1 if job.prompt_logprobs else len(job.prompt_T) - 1


def _logprobs(
    base: BaseModel, hidden_BTH: Tensor, jobs_B: Sequence[SampleJob], starts_B: Sequence[int]
) -> list[Tensor | None]:
    """Score all prompts in one call, so that the head's weights are read once per chunk and not once per prompt."""
    scored = [index for index, job in enumerate(jobs_B) if job.prompt_logprobs]
    logprobs_B: list[Tensor | None] = [None] * len(jobs_B)
    if not scored:
        return logprobs_B
    firsts = [first_scored_position(jobs_B[index]) for index in scored]
    targets = [jobs_B[index].prompt_T[first:] for index, first in zip(scored, firsts, strict=True)]
    hidden_NH = torch.cat(
        [
            hidden_BTH[index, first - 1 - starts_B[index] : len(jobs_B[index].prompt_T) - 1 - starts_B[index]]
            for index, first in zip(scored, firsts, strict=True)
        ]
    )
    targets_N = torch.cat(targets).to(base.device)
    rows_N = torch.arange(len(targets_N), device=base.device)
    logprobs_N = target_logprobs(hidden_NH, base.head, base.head_lora(), rows_N, targets_N).cpu()
    for index, first, part in zip(scored, firsts, logprobs_N.split([len(t) for t in targets]), strict=True):
        logprobs_B[index] = torch.cat([torch.full((first,), float("nan")), part])
    return logprobs_B


def _score(base: BaseModel, hidden_TH: Tensor, job: SampleJob, logprobs_T: Tensor | None) -> PromptScores:
    """Add the scores that need the logits of the whole vocabulary, computed chunk by chunk, to the logprobs."""
    if not (job.topk_prompt or job.prompt_draws or job.prompt_targets is not None):
        return PromptScores(logprobs_T)
    # Jobs with these scores need all hidden states (`first_needed_position`), so ``hidden_TH`` starts at position 0.
    uniform = random.Random(f"{job.seed}:prompt")
    chunks = []
    step = max(1, CHUNK_ELEMENTS // base.loaded.vocab_size)
    for start in range(0, len(hidden_TH), step):
        logprobs_NV = base.logits(hidden_TH[start : start + step]).log_softmax(dim=1)
        chunks.append((_top(logprobs_NV, job), _targets(logprobs_NV, job, start), _draws(logprobs_NV, job, uniform)))
    tops, targets, draws = zip(*chunks, strict=True) if chunks else ((), (), ())
    return PromptScores(
        logprobs_T,
        _join_tops(tops, job) if job.topk_prompt else None,
        None if job.prompt_targets is None else torch.cat([torch.empty(0, job.prompt_targets.shape[1]), *targets]),
        _join_draws(draws, job) if job.prompt_draws else None,
    )


def _top(logprobs_NV: Tensor, job: SampleJob) -> tuple[Tensor, Tensor]:
    logprobs_NK, tokens_NK = logprobs_NV.topk(min(job.topk_prompt, logprobs_NV.shape[1]), dim=1)
    return tokens_NK.int().cpu(), logprobs_NK.cpu()


def _join_tops(tops: Sequence[tuple[Tensor, Tensor]], job: SampleJob) -> TopTokens:
    """Join the chunks, and fill the prompt positions before the first scored one with `NO_LOGPROB`."""
    first, length = first_scored_position(job), len(job.prompt_T)
    k = tops[0][0].shape[1] if tops else job.topk_prompt
    joined = TopTokens(torch.zeros(length, k, dtype=torch.int32), torch.full((length, k), NO_LOGPROB))
    if tops:
        joined.tokens[first:] = torch.cat([tokens_NK for tokens_NK, _ in tops])[first - 1 :]
        joined.logprobs[first:] = torch.cat([logprobs_NK for _, logprobs_NK in tops])[first - 1 :]
    return joined


def _targets(logprobs_NV: Tensor, job: SampleJob, start: int) -> Tensor:
    if job.prompt_targets is None:
        return torch.empty(0)
    targets_NK = job.prompt_targets[start : start + len(logprobs_NV)].to(logprobs_NV.device)
    return logprobs_NV.gather(1, targets_NK.clamp(min=0)).masked_fill(targets_NK < 0, 0.0).cpu()


def _draws(logprobs_NV: Tensor, job: SampleJob, uniform: random.Random) -> tuple[Tensor, Tensor]:
    """Draw tokens at the job's temperature, with replacement, without top-k and top-p limits."""
    num_rows, vocab_size = logprobs_NV.shape
    params = RowSamplingParams(
        torch.full((num_rows,), job.temperature, device=logprobs_NV.device),
        torch.full((num_rows,), vocab_size, device=logprobs_NV.device),
        torch.ones(num_rows, device=logprobs_NV.device),
    )
    draws = []
    for _ in range(job.prompt_draws):
        uniform_N = torch.tensor([uniform.random() for _ in range(num_rows)], dtype=torch.float64)
        draws.append(choose_tokens(logprobs_NV, params, uniform_N.to(logprobs_NV.device)))
    tokens_NK = torch.stack(draws, dim=1) if draws else torch.empty(num_rows, 0, dtype=torch.int64)
    return tokens_NK.cpu(), logprobs_NV.gather(1, tokens_NK.to(logprobs_NV.device)).cpu()


def _join_draws(draws: Sequence[tuple[Tensor, Tensor]], job: SampleJob) -> tuple[Tensor, Tensor]:
    empty = torch.empty(0, job.prompt_draws)
    return torch.cat([empty.long(), *(part[0] for part in draws)]), torch.cat([empty, *(part[1] for part in draws)])
