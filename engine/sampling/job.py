"""What a sampling request asks for, and what it gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.errors import RequestError

MAX_SAMPLES = 1024


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
        seed: of the first continuation; the others derive from it.
        prompt_logprobs: how many of the last prompt tokens to score.
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
    prompt_logprobs: int

    @property
    def num_cached_tokens(self) -> int:
        """What the job takes of the key-value cache at most."""
        return (len(self.prompt_T) + self.max_tokens) * self.num_samples


@dataclass(frozen=True, slots=True)
class Continuation:
    """One continuation: its tokens, their logprobs under the model (before temperature), why it ended."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool


@dataclass(frozen=True, slots=True)
class SampleResult:
    """All continuations of a job; `prompt_logprobs_T` is float32 with NaN where nothing was scored."""

    sequences: Sequence[Continuation]
    prompt_logprobs_T: Tensor | None


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
    ]
    for holds, sentence in refusals:
        if holds:
            raise RequestError(sentence)
