"""Sampling request in progress: its completions, and their stop conditions."""

from __future__ import annotations

import random

import torch
from transformers import PreTrainedTokenizerBase

from engine.compute.lora import Adapter
from engine.sampling.job import Completion, PromptScores, SampleJob, SampleResult, TopTokens

STOP_MARGIN = 8  # extra tokens to decode: the first may be half a character, or lose its space at the start of the text


class Row:
    """One completion in progress. Its state suffices to continue it in any batch."""

    def __init__(self, request: SamplingRequest, sample: int) -> None:
        self.request = request
        self.random = random.Random((request.job.seed + sample) % 2**64)  # it ignores the sign of an integer
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[TopTokens] = []
        self.stopped = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including the prompt."""
        return len(self.request.job.prompt_T) + len(self.tokens)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens, including the prompt."""
        return len(self.request.job.prompt_T) + self.request.job.max_tokens

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) >= self.request.job.max_tokens

    @property
    def prefill_key(self) -> tuple[Adapter | None, object]:
        """Rows with equal keys share one prefill: same adapter, same prompt, no tokens so far."""
        return self.request.adapter, self if self.tokens else self.request.prompt_key

    def context_T(self) -> torch.Tensor:
        """Prompt and completion so far, int64."""
        return torch.cat([self.request.job.prompt_T, torch.tensor(self.tokens, dtype=torch.int64)])

    def completion(self) -> Completion:
        top = None
        if self.request.job.topk_sample:
            top = TopTokens(*(torch.stack(part) for part in zip(*self.top, strict=True)))
        return Completion(self.tokens, self.logprobs, self.stopped, top)


class SamplingRequest:
    """A job with its adapter (None is the base model), its rows and its prompt scores, once computed.

    Attributes:
        is_finite: False after a row had logits that are not finite, so that the request fails.
    """

    def __init__(self, job: SampleJob, adapter: Adapter | None) -> None:
        self.job = job
        self.adapter = adapter
        self.prompt_scores: PromptScores | None = None
        self.is_finite = True
        self.rows = [Row(self, sample) for sample in range(job.num_samples)]
        # Requests with equal keys share a prefill: same prompt and no prompt scores. Clients often send
        # the samples of a group as separate requests. Bytes compute their hash only once.
        self.prompt_key: object = self if job.scores_prompt else job.prompt_T.numpy().tobytes()

    @property
    def done(self) -> bool:
        return all(row.done for row in self.rows)

    def close(self) -> None:
        """Drop the rows: a cycle of references would keep the adapter in memory until a garbage collection."""
        self.rows = []

    def result(self) -> SampleResult:
        """Return the result of a finished request."""
        assert self.prompt_scores is not None
        return SampleResult([row.completion() for row in self.rows], self.prompt_scores)


def ends_with_stop(tokens: list[int], job: SampleJob, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the last of ``tokens`` is a stop token, or completes a stop string.

    A stop string spans at most as many tokens as it has bytes, so only that many of the last tokens, plus a
    margin, are decoded.
    """
    if tokens[-1] in job.stop_tokens:
        return True
    if not job.stop_strings:
        return False
    longest = max(len(stop.encode()) for stop in job.stop_strings)
    text = tokenizer.decode(tokens[-(longest + STOP_MARGIN) :], clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return any(stop in text for stop in job.stop_strings)
