"""Requests of a group's members to a snapshot of the weights."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from tinker import types

from tasks.rl.rollouts.completer import SnapshotCompleter
from tasks.rl.rollouts.sampling_distribution import SamplingDistribution

PROMPT = types.ModelInput.from_ints([5, 6, 7])


class RecordingSampler:
    """Sampling client that records its requests; the token of sample n is n."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, int]] = []

    async def sample(
        self, prompt: types.ModelInput, num_samples: int, params: types.SamplingParams, **_: Any
    ) -> SimpleNamespace:
        self.requests.append((num_samples, params.seed or 0))
        sequences = [SimpleNamespace(tokens=[n], logprobs=[0.0], stop_reason="stop") for n in range(num_samples)]
        return SimpleNamespace(sequences=sequences, prompt_cache_hit_tokens=0)


def sample(order: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Let members sample in an order; return their tokens, and the number of samples and the seed of each request."""
    sampler = RecordingSampler()
    completer = SnapshotCompleter(cast(Any, sampler), max_tokens=8, distribution=SamplingDistribution(), key=(0, 1, 2))
    members = completer.members(attempt=0, num_members=len(order))

    async def run() -> dict[int, int]:
        completions = await asyncio.gather(*(members[index](PROMPT, []) for index in order))
        return {index: completion.tokens[0] for index, completion in zip(order, completions, strict=True)}

    tokens = asyncio.run(run())
    return [tokens[index] for index in range(len(order))], sampler.requests


def test_request_and_seeds_do_not_depend_on_the_order_of_the_members() -> None:
    tokens, requests = sample([0, 1, 2])
    assert tokens == [0, 1, 2]
    assert [num_samples for num_samples, _ in requests] == [3]
    assert sample([2, 0, 1]) == (tokens, requests)
