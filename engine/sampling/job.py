"""What a sampling request asks for, and what it gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from engine.errors import RequestError

MAX_SAMPLES = 1024
MAX_TOP = 1024
NO_LOGPROB = -99999.0  # the SDK's mark of an empty cell


@dataclass(frozen=True, slots=True)
class SampleJob:
    """One prompt to be continued ``num_samples`` times.

    Attributes:
        prompt_T: int64 ``(T,)``.
        max_tokens: of each continuation.
        temperature: 0 takes the likeliest token.
        top_k: how many of the likeliest tokens to choose from.
        top_p: the probability mass, after temperature, of the likeliest tokens to choose from.
        stop_tokens: a continuation ends behind one of these,
        stop_strings: or as soon as its text holds one of these.
        seed: of the first continuation; that of the next is one more, and so on.
        prompt_logprobs: how many of the last prompt tokens to score.
        topk_prompt: how many of the likeliest tokens to give at each of these, or at each where none is scored.
        topk_sample: how many of the likeliest tokens to give at each sampled one.
        prompt_targets: int64 ``(T - 1, K)``: tokens to score in place of each prompt token after the first; -1 is none.
        prompt_draws: how many tokens to draw in place of each prompt token after the first.
    """

    prompt_T: Tensor
    num_samples: int
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop_tokens: frozenset[int]
    stop_strings: tuple[str, ...]
    seed: int
    prompt_logprobs: int = 0
    topk_prompt: int = 0
    topk_sample: int = 0
    prompt_targets: Tensor | None = None
    prompt_draws: int = 0

    @property
    def scores_prompt(self) -> bool:
        """Whether anything is asked about the prompt."""
        return bool(self.prompt_logprobs or self.topk_prompt or self.prompt_draws or self.prompt_targets is not None)


class TopTokens(NamedTuple):
    """The ``k`` likeliest tokens at each of ``L`` positions, likeliest first.

    `tokens` is int32 ``(L, k)``, `logprobs` float32; a position that was not asked for holds 0 and `NO_LOGPROB`.
    """

    tokens: Tensor
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class Continuation:
    """One continuation: its tokens, their logprobs under the model (before temperature), why it ended."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    top: TopTokens | None = None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What was asked about the prompt, all under the model itself, before temperature.

    Attributes:
        logprobs_T: float32, NaN where nothing was scored.
        top: of every prompt position.
        targets: float32, shaped as the job's `prompt_targets`, 0 where that has -1.
        draws: int64 ``(T - 1, k)`` and their logprobs.
    """

    logprobs_T: Tensor | None = None
    top: TopTokens | None = None
    targets: Tensor | None = None
    draws: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    """All continuations of a job, and the scores of its prompt."""

    sequences: Sequence[Continuation]
    prompt: PromptScores


def check_job(job: SampleJob, max_context: int) -> None:
    """Raise a RequestError unless the sampler can do the job."""
    length = len(job.prompt_T)
    refusals = [
        (not 1 <= job.num_samples <= MAX_SAMPLES, f"num_samples is {job.num_samples}; give 1 to {MAX_SAMPLES}."),
        (length == 0, "The prompt is empty: send at least one token."),
        (
            length > max_context,
            f"The prompt has {length} tokens, but the model's context is {max_context}: shorten it.",
        ),
        (job.max_tokens < 1, f"max_tokens is {job.max_tokens}; give 1 or more."),
        (not 0 <= job.temperature < math.inf, f"temperature is {job.temperature}; give 0 or more."),
        (not 0 < job.top_p <= 1, f"top_p is {job.top_p}; give a number above 0, up to 1."),
        (job.top_k < 1, f"top_k is {job.top_k}; give 1 or more, or -1 for no limit."),
        (
            not 0 <= job.prompt_logprobs <= length,
            f"prompt_logprobs_last_n is {job.prompt_logprobs}; give 1 to {length - 1}, the prompt's length less 1.",
        ),
        *(
            (not 0 <= k <= MAX_TOP, f"{name} is {k}; give 0 to {MAX_TOP}.")
            for name, k in (
                ("topk_prompt_logprobs", job.topk_prompt),
                ("topk_sample_logprobs", job.topk_sample),
                ("prompt_alt_tokens_k", job.prompt_draws),
            )
        ),
        (
            job.prompt_targets is not None and (job.prompt_targets.dim() != 2 or len(job.prompt_targets) != length - 1),
            f"target_prompt_logprobs asks for {_shape(job.prompt_targets)} tokens of a prompt of {length}; give a "
            f"tensor of shape ({length - 1}, K), a row for each token after the first.",
        ),
    ]
    for holds, sentence in refusals:
        if holds:
            raise RequestError(sentence)


def _shape(tensor: Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else tuple(tensor.shape)
