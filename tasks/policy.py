"""The policy that rollouts sample from: a snapshot of the weights, with seeds that a resumed run draws again.

Members of a group that ask the same at the same moment, as all do in their first turn, are one request for several
samples: the service reads the prompt once. The seeds do not depend on it: that of a member is its group's plus its
index, as the engine takes the seed of a request's n-th sample to be the request's plus n.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import tinker
from tinker import types
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs

from tasks.service_errors import service_errors


@dataclass(frozen=True, slots=True)
class Policy(TokenCompleter):
    """What the members of groups sample from.

    Attributes:
        sampler: a snapshot of the weights.
        max_tokens: the most in one turn.
        temperature: of the sampling.
        key: what the seed of each turn is derived from, with the attempt, the member and the turn: the run's seed, the
            step, the group.
        by_prompt: whether it is derived from what is asked, too; for groups that have one key.
    """

    sampler: tinker.SamplingClient
    max_tokens: int
    temperature: float
    key: tuple[int, ...]
    by_prompt: bool = False

    def members(self, attempt: int, num_members: int) -> Sequence[TokenCompleter]:
        """The policy of each member of a group in one attempt."""
        requests = _Requests(self, attempt)
        return [_Member(requests, index) for index in range(num_members)]

    def seed(self, attempt: int, asked: _Asked) -> int:
        """Of the first member, for what it asks."""
        prompt = asked.prompt.model_dump_json() if self.by_prompt else ""
        text = f"{(*self.key, attempt, asked.turn)!r}{prompt}"
        # Of 32 bits the upper 30: there is room above for the members.
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 2


class _Asked(NamedTuple):
    turn: int
    max_tokens: int
    stop: StopCondition
    prompt: tinker.ModelInput


class _Waiting(NamedTuple):
    member: int
    asked: _Asked
    answer: asyncio.Future[TokensWithLogprobs]


@dataclass(frozen=True, slots=True)
class _Member(TokenCompleter):
    requests: _Requests
    index: int
    turns: Iterator[int] = field(default_factory=itertools.count)

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        most = self.requests.policy.max_tokens
        limit = most if max_tokens is None else min(most, max_tokens)
        return await self.requests.ask(self.index, _Asked(next(self.turns), limit, stop, model_input))


class _Requests:
    """Those of a group in one attempt."""

    def __init__(self, policy: Policy, attempt: int) -> None:
        self.policy = policy
        self._attempt = attempt
        self._waiting: list[_Waiting] = []
        self._running: set[asyncio.Task[None]] = set()

    def ask(self, member: int, asked: _Asked) -> asyncio.Future[TokensWithLogprobs]:
        """The answer to come: the request is sent once the members that can ask now have asked."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append(_Waiting(member, asked, loop.create_future()))
        return self._waiting[-1].answer

    def _send(self) -> None:
        alike: list[list[_Waiting]] = []
        for each in sorted(self._waiting, key=lambda waiting: waiting.member):
            last = alike[-1][-1] if alike else None
            if last and last.member + 1 == each.member and last.asked == each.asked:
                alike[-1].append(each)
            else:
                alike.append([each])
        self._waiting = []
        for some in alike:
            request = asyncio.create_task(self._sample(some))
            self._running.add(request)
            request.add_done_callback(self._running.discard)
            for each in some:
                each.answer.add_done_callback(lambda _, request=request, some=some: _cancel_unawaited(request, some))

    async def _sample(self, some: Sequence[_Waiting]) -> None:
        first, asked, _ = some[0]
        params = types.SamplingParams(
            stop=asked.stop,
            max_tokens=asked.max_tokens,
            temperature=self.policy.temperature,
            seed=self.policy.seed(self._attempt, asked) + first,
        )
        try:
            with service_errors("sample a rollout"):
                response = await self.policy.sampler.sample(asked.prompt, len(some), params)
            answers = [TokensWithLogprobs(each.tokens, each.logprobs, each.stop_reason) for each in response.sequences]
            for waiting, answer in zip(some, answers, strict=True):
                if not waiting.answer.done():
                    waiting.answer.set_result(answer)
        except Exception as error:  # noqa: BLE001 - each member raises it again
            for waiting in some:
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)


def _cancel_unawaited(request: asyncio.Task[None], some: Sequence[_Waiting]) -> None:
    if all(each.answer.cancelled() for each in some):
        request.cancel()
