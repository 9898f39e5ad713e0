"""Sampling jobs and their results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from engine.errors import RequestError

MAX_SAMPLES = 1024
MAX_TOP = 1024
NO_LOGPROB = -99999.0  # the SDK's marker for an empty cell


@dataclass(frozen=True, slots=True)
class SampleJob:
    """One prompt to be completed ``num_samples`` times.

    Attributes:
        prompt_T: int64 ``(T,)``.
        max_tokens: maximum length of each completion.
        temperature: 0 always chooses the likeliest token.
        top_k: number of likeliest tokens to choose from.
        top_p: probability mass, after temperature, of the likeliest tokens to choose from.
        stop_tokens: tokens that end a completion.
        stop_strings: strings that end a completion as soon as its text contains one of them.
        seed: seed of the first completion; each further completion adds one.
        prompt_logprobs: number of last prompt tokens to score.
        topk_prompt: number of likeliest tokens per scored prompt token, or per prompt token if no token is scored.
        topk_sample: number of likeliest tokens per sampled token.
        prompt_targets: int64 ``(T - 1, K)``: tokens to score at each prompt position after the first; -1 is empty.
        prompt_draws: number of tokens to draw at each prompt position after the first.
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
        """True if the job needs any scores of the prompt."""
        return bool(self.prompt_logprobs or self.topk_prompt or self.prompt_draws or self.prompt_targets is not None)


class TopTokens(NamedTuple):
    """The ``k`` likeliest tokens at each of ``L`` positions, likeliest first.

    `tokens` is int32 ``(L, k)``, `logprobs` is float32; positions that were not requested have 0 and `NO_LOGPROB`.
    """

    tokens: Tensor
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion: its tokens, their logprobs under the model (before temperature), and its top tokens.

    `stopped` is True after a stop token or string, False at the maximum length.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    top: TopTokens | None = None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of the prompt, all under the model itself, before temperature.

    Attributes:
        logprobs_T: float32, NaN at positions without a score.
        top: likeliest tokens at every prompt position.
        targets: float32, shaped as the job's `prompt_targets`, 0 for empty targets.
        draws: int64 ``(T - 1, k)`` and their logprobs.
    """

    logprobs_T: Tensor | None = None
    top: TopTokens | None = None
    targets: Tensor | None = None
    draws: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    """All completions of a job, and the scores of its prompt."""

    sequences: Sequence[Completion]
    prompt: PromptScores


def check_job(job: SampleJob, max_context: int) -> None:
    """Raise a RequestError if the sampler cannot run the job."""
    length = len(job.prompt_T)
    rejections = [
        (not 1 <= job.num_samples <= MAX_SAMPLES, f"num_samples is {job.num_samples}; use 1 to {MAX_SAMPLES}."),
        (length == 0, "The prompt is empty: send at least one token."),
        (
            length > max_context,
            f"The prompt has {length} tokens, but the model's context is {max_context}: shorten it.",
        ),
        (job.max_tokens < 1, f"max_tokens is {job.max_tokens}; use 1 or more."),
        (not 0 <= job.temperature < math.inf, f"temperature is {job.temperature}; use 0 or more."),
        (not 0 < job.top_p <= 1, f"top_p is {job.top_p}; use a number above 0 and at most 1."),
        (job.top_k < 1, f"top_k is {job.top_k}; use 1 or more, or -1 for no limit."),
        *(
            (not 0 <= k <= MAX_TOP, f"{name} is {k}; use 0 to {MAX_TOP}.")
            for name, k in (
                ("topk_prompt_logprobs", job.topk_prompt),
                ("topk_sample_logprobs", job.topk_sample),
                ("prompt_alt_tokens_k", job.prompt_draws),
            )
        ),
    ]
    for is_rejected, sentence in rejections:
        if is_rejected:
            raise RequestError(sentence)
