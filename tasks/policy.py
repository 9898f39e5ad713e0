"""The policy that rollouts sample from: a snapshot of the weights, with seeds that a resumed run draws again."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import tinker
from tinker import types
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs

from tasks.service_errors import service_errors


@dataclass(frozen=True, slots=True)
class Policy(TokenCompleter):
    """Samples the turns of one member of a group.

    Attributes:
        sampler: a snapshot of the weights.
        max_tokens: the most in one turn.
        temperature: of the sampling.
        key: what the seed of each turn is derived from: the run's seed, the step, the group, and once `member` said
            so, the attempt and the member.
        by_prompt: whether it is derived from what is asked, too; for groups that have one key.
    """

    sampler: tinker.SamplingClient
    max_tokens: int
    temperature: float
    key: tuple[int, ...]
    by_prompt: bool = False
    turns: Iterator[int] = field(default_factory=itertools.count)

    def member(self, attempt: int, index: int) -> Policy:
        """The policy of one member of the group in one attempt."""
        return Policy(self.sampler, self.max_tokens, self.temperature, (*self.key, attempt, index), self.by_prompt)

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        limit = self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens)
        asked = model_input.model_dump_json() if self.by_prompt else ""
        params = types.SamplingParams(
            stop=stop, max_tokens=limit, temperature=self.temperature, seed=_seed((*self.key, next(self.turns)), asked)
        )
        with service_errors("sample a rollout"):
            response = await self.sampler.sample(model_input, 1, params)
        (sequence,) = response.sequences
        return TokensWithLogprobs(sequence.tokens, sequence.logprobs, sequence.stop_reason)


def _seed(key: tuple[int, ...], asked: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{key!r}{asked}".encode()).digest()[:4], "big") >> 1
