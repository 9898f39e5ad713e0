"""What a sampling request asks for, and what it gets."""

from __future__ import annotations

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
        top_k: how many of the likeliest tokens to choose from; 0 is all.
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
    """One continuation: its tokens, their logprobs under the model itself (before temperature), why it ended."""

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
    good = {
        f"num_samples is {job.num_samples}; give 1 to {MAX_SAMPLES}.": 1 <= job.num_samples <= MAX_SAMPLES,
        "The prompt is empty: send at least one token.": len(job.prompt_T) > 0,
        f"The prompt has {len(job.prompt_T)} tokens, but the model's context is {max_context}: shorten it.": len(
            job.prompt_T
        )
        <= max_context,
        f"max_tokens is {job.max_tokens}; give 1 or more.": job.max_tokens >= 1,
        f"temperature is {job.temperature}; give 0 or more.": 0 <= job.temperature < float("inf"),
        f"top_p is {job.top_p}; give a number above 0, up to 1.": 0 < job.top_p <= 1,
        f"top_k is {job.top_k}; give 1 or more, or -1 for no limit.": job.top_k >= 0,
        "prompt_logprobs_last_n is out of range: give 1 to the prompt's length less 1.": 0
        <= job.prompt_logprobs
        <= len(job.prompt_T),
    }
    for sentence, holds in good.items():
        if not holds:
            raise RequestError(sentence)
