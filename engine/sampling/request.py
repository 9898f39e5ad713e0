"""A sampling request on its way, and its continuations."""

from __future__ import annotations

import random

import torch

from engine.compute.lora import Adapter
from engine.sampling.job import Continuation, PromptScores, SampleJob, SampleResult, TopTokens


class Row:
    """One continuation: what it has so far is all that is needed to go on, in any batch."""

    def __init__(self, request: Request, sample: int) -> None:
        self.request = request
        self.random = random.Random(request.job.seed + sample)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[TopTokens] = []
        self.stopped = False

    @property
    def num_tokens(self) -> int:
        """With the prompt's."""
        return len(self.request.job.prompt_T) + len(self.tokens)

    @property
    def max_tokens(self) -> int:
        """That it may come to, with the prompt's."""
        return len(self.request.job.prompt_T) + self.request.job.max_tokens

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) >= self.request.job.max_tokens

    def context_T(self) -> torch.Tensor:
        """Prompt and continuation so far, int64."""
        return torch.cat([self.request.job.prompt_T, torch.tensor(self.tokens, dtype=torch.int64)])

    def continuation(self) -> Continuation:
        top = None
        if self.request.job.topk_sample:
            top = TopTokens(*(torch.stack(part) for part in zip(*self.top, strict=True)))
        return Continuation(self.tokens, self.logprobs, self.stopped, top)


class Request:
    """A job, the adapter it is computed under (None is the base model) and what is known so far."""

    def __init__(self, job: SampleJob, adapter: Adapter | None) -> None:
        self.job = job
        self.adapter = adapter
        self.prompt: PromptScores | None = None
        self.rows = [Row(self, sample) for sample in range(job.num_samples)]
        # Requests of one key read the same prompt, and ask nothing about it: a group's members come one by one.
        self.prompt_key: object = self if job.scores_prompt else tuple(job.prompt_T.tolist())

    @property
    def done(self) -> bool:
        return all(row.done for row in self.rows)

    def result(self) -> SampleResult:
        """Once it is done."""
        assert self.prompt is not None
        return SampleResult([row.continuation() for row in self.rows], self.prompt)
