"""Sample the rollouts of a group from a snapshot of the weights, with reproducible seeds.

Members of a group that send the same prompt at the same time, as all do in their first turn, share one request for
several samples, so that the service processes the prompt once. Merging does not change the seeds: a member's seed is
its group's seed plus its index, and the engine gives sample n of a request the request's seed plus n. A merged
request returns only when its longest sample is done, so in rollouts of several turns each member has its own request
and does not wait for the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import NamedTuple

import tinker
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs

from tasks.common.service_errors import service_errors
from tasks.rl.rollouts.custom_completer import CheckedCompleter, CompleterSpec
from tasks.rl.rollouts.group_progress import GroupProgress
from tasks.rl.rollouts.sampling_distribution import SamplingDistribution
from tasks.training.batch_source import SampledTokens


@dataclass(frozen=True, slots=True)
class SnapshotCompleter(TokenCompleter):
    """Factory of the completers of a group's members, which sample from one snapshot of the weights.

    It is a `TokenCompleter` only so that tinker-cookbook's evaluator and rollouts accept it and pass it to the
    strategy. It cannot be called; the strategy calls `members`.

    Attributes:
        sampler: client of the snapshot.
        max_tokens: maximum tokens per turn.
        distribution: temperature, top-k and top-p of the samples.
        key: run's seed, step and group, or run's seed and held-out group; with the attempt, member and turn, it
            determines the seed of a request.
        custom: completer of the user, which samples in place of this one; None if there is none.
        merges: True to merge equal requests of members; False for rollouts of several turns.
        progress: tokens sampled by all members in all attempts.
    """

    sampler: tinker.SamplingClient
    max_tokens: int
    distribution: SamplingDistribution
    key: tuple[int, ...]
    custom: CompleterSpec | None = None
    merges: bool = True
    progress: GroupProgress = field(default_factory=GroupProgress, compare=False)

    def members(self, attempt: int, num_members: int) -> Sequence[TokenCompleter]:
        """Completer of each member of a group in one attempt."""
        if self.custom:
            offered = {
                "sampling_client": self.sampler,
                "max_tokens": self.max_tokens,
                "temperature": self.distribution.temperature,
            }
            first = self.seed(attempt, turn=0)
            return [
                CheckedCompleter(self.custom, self.progress, seed=first + index, **offered)
                for index in range(num_members)
            ]
        requests = _Requests(self, attempt)
        return [_Member(requests, index) for index in range(num_members)]

    def seed(self, attempt: int, turn: int) -> int:
        """Seed of the first member's request."""
        text = repr((*self.key, attempt, turn))
        # 30 of 32 bits, so that adding the member's index does not overflow.
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 2


class _Turn(NamedTuple):
    number: int
    max_tokens: int
    stop: StopCondition
    prompt: tinker.ModelInput


class _Waiter(NamedTuple):
    member: int
    turn: _Turn
    completion: asyncio.Future[TokensWithLogprobs]


@dataclass(frozen=True, slots=True)
class _Member(TokenCompleter):
    requests: _Requests
    index: int
    turns: Iterator[int] = field(default_factory=itertools.count)

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        limit = self.requests.completer.max_tokens
        if max_tokens is not None:
            limit = min(limit, max_tokens)
        return await self.requests.enqueue(self.index, _Turn(next(self.turns), limit, stop, model_input))


class _Requests:
    """Requests of a group in one attempt."""

    def __init__(self, completer: SnapshotCompleter, attempt: int) -> None:
        self.completer = completer
        self._attempt = attempt
        self._waiting: list[_Waiter] = []
        self._running: set[asyncio.Task[None]] = set()

    def enqueue(self, member: int, turn: _Turn) -> asyncio.Future[TokensWithLogprobs]:
        """Enqueue a turn; requests are sent after all members that are ready have enqueued their turns."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append(_Waiter(member, turn, loop.create_future()))
        return self._waiting[-1].completion

    def _send(self) -> None:
        """Send the waiting turns; equal ones of consecutive members share a request if the completer merges them."""
        batches: list[list[_Waiter]] = []
        for waiter in sorted(self._waiting, key=lambda waiter: waiter.member):
            last = batches[-1][-1] if batches and self.completer.merges else None
            if last and last.member + 1 == waiter.member and last.turn == waiter.turn:
                batches[-1].append(waiter)
            else:
                batches.append([waiter])
        self._waiting = []
        for batch in batches:
            request = asyncio.create_task(self._sample(batch))
            self._running.add(request)
            request.add_done_callback(self._running.discard)
            for waiter in batch:
                waiter.completion.add_done_callback(
                    lambda _, request=request, batch=batch: _cancel_unused(request, batch)
                )

    async def _sample(self, batch: Sequence[_Waiter]) -> None:
        first_member, turn, _ = batch[0]
        distribution, seed = self.completer.distribution, self.completer.seed(self._attempt, turn.number) + first_member
        params = distribution.params(max_tokens=turn.max_tokens, seed=seed, stop=turn.stop)
        progress, request = self.completer.progress, (len(batch), turn.prompt.length, turn.max_tokens)
        progress.start_request(*request)
        sampled: SampledTokens | None = None
        began = perf_counter()
        try:
            with service_errors("sample a rollout"):
                response = await self.completer.sampler.sample(
                    turn.prompt, len(batch), params, topk_sample_logprobs=distribution.num_requested
                )
            # The service bills the prompts of all samples but the first as cache hits.
            num_cached = (len(batch) - 1) * turn.prompt.length + response.prompt_cache_hit_tokens
            num_sampled = sum(len(sequence.tokens) for sequence in response.sequences)
            sampled = SampledTokens(len(batch) * turn.prompt.length, num_sampled, num_cached)
            for waiter, sequence in zip(batch, response.sequences, strict=True):
                if not waiter.completion.done():
                    completion = distribution.completion(sequence)
                    completion = replace(completion, duration_s=perf_counter() - began)
                    waiter.completion.set_result(completion)
        except Exception as error:  # noqa: BLE001 - each member raises it again
            for waiter in batch:
                if not waiter.completion.done():
                    waiter.completion.set_exception(error)
        finally:
            progress.end_request(*request, sampled)


def _cancel_unused(request: asyncio.Task[None], batch: Sequence[_Waiter]) -> None:
    """Cancel a request whose members have all been cancelled."""
    if all(waiter.completion.cancelled() for waiter in batch):
        request.cancel()
