"""What evaluators that sample answers and grade each one share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from typing import ClassVar

import tinker
from pydantic.dataclasses import dataclass
from tinker_cookbook.renderers import Message
from tinker_cookbook.tokenizer_utils import Tokenizer

from tasks.rows import read_rows
from tasks.sample import Answer, Sampling, open_renderer, sample_answers
from tasks.sampled.summary import Graded, check_pass_at, summarize
from tasks.tokenized import TokenizedEvaluator


@dataclass(frozen=True, kw_only=True)
class SampledEvaluator(TokenizedEvaluator):
    """Asks the problems of a JSONL file; a subclass says how, and what is right.

    Attributes:
        path: the JSONL file.
        renderer_name: the model's chat format, a renderer of tinker-cookbook.
        name: of the metric, `test/<name>`.
        instruction: what each question is asked with.
        limit: ask so many problems only, the first ones.
        pass_at: for these k, log the chance that one of k answers is right.
        sampling: how answers are drawn.
    """

    required: ClassVar[tuple[str, ...]] = ()

    path: str
    renderer_name: str
    name: str
    instruction: str = ""
    limit: int | None = None
    pass_at: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        """Read what there is to ask, so that what cannot be used is told before a run."""
        check_pass_at(self.pass_at, self.sampling.num_samples)
        assert self.rows

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """The problems."""
        return read_rows(self.path, self.required, self.limit)

    async def measure(self, sampler: tinker.SamplingClient, tokenizer: Tokenizer) -> dict[str, float]:
        renderer = open_renderer(self.renderer_name, tokenizer)
        conversations = [[Message(role="user", content=self.question(row))] for row in self.rows]
        answers_PG = await sample_answers(sampler, renderer, conversations, self.sampling)
        graded_PG = [
            list(await asyncio.gather(*(self.grade(answer, row) for answer in answers_G)))
            for row, answers_G in zip(self.rows, answers_PG, strict=True)
        ]
        return summarize(self.name, graded_PG, self.pass_at)

    def question(self, row: Mapping[str, str]) -> str:
        """What is asked."""
        raise NotImplementedError

    async def grade(self, answer: Answer, row: Mapping[str, str]) -> Graded:
        """What becomes of an answer."""
        raise NotImplementedError
