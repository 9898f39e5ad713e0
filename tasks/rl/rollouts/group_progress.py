"""Tokens that the rollout of a group has sampled so far, and its cancellation."""

from __future__ import annotations

from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, TypeVar

from tasks.common.event_loop import start_coroutine
from tasks.training.batch_source import SampledTokens

T = TypeVar("T")


class RolloutCancelledError(Exception):
    """The rollout of a group was cancelled because its step needs no more groups."""


@dataclass(frozen=True, slots=True)
class ProgressCounts:
    """Tokens and completions of a group.

    Attributes:
        sampled: tokens of all responses.
        num_completions: completions of all responses.
        num_open: completions that the service has not returned yet.
        open_prompts: prompt tokens of the requests for them.
        max_open_tokens: most tokens that the service can sample for them.
    """

    sampled: SampledTokens
    num_completions: int
    num_open: int
    open_prompts: SampledTokens
    max_open_tokens: int


class TokenCounter:
    """Tokens that all groups of a run have sampled so far. Thread-safe."""

    def __init__(self) -> None:
        self._sampled = SampledTokens()
        self._lock = Lock()

    @property
    def sampled(self) -> SampledTokens:
        """Tokens of all responses so far."""
        return self._sampled

    def add(self, sampled: SampledTokens) -> None:
        """Count the tokens of a response."""
        with self._lock:
            self._sampled += sampled


class GroupProgress:
    """Tokens that the rollout of a group has sampled so far in all attempts, and its cancellation. Thread-safe."""

    def __init__(self, counter: TokenCounter | None = None) -> None:
        """Start at zero; `counter` counts the tokens of all groups."""
        self._counter = counter or TokenCounter()
        self._counts = ProgressCounts(SampledTokens(), 0, 0, SampledTokens(), 0)
        self._lock = Lock()
        self._running: Future[Any] | None = None
        self._is_cancelled = False

    @property
    def counts(self) -> ProgressCounts:
        """Counts so far."""
        return self._counts

    def start_request(self, num: int, prompt_length: int, max_tokens: int) -> None:
        """Count a request for `num` completions of a prompt."""
        self._add_open(num, prompt_length, max_tokens, 1)

    def end_request(self, num: int, prompt_length: int, max_tokens: int, sampled: SampledTokens | None) -> None:
        """Count the end of a request and the tokens of its response; `sampled` is None if there is no response."""
        self._add_open(num, prompt_length, max_tokens, -1, sampled)

    def add(self, sampled: SampledTokens, num_completions: int) -> None:
        """Count the tokens of completions."""
        self._counter.add(sampled)
        with self._lock:
            counts = self._counts
            self._counts = replace(
                counts, sampled=counts.sampled + sampled, num_completions=counts.num_completions + num_completions
            )

    def _add_open(
        self, num: int, prompt_length: int, max_tokens: int, sign: int, sampled: SampledTokens | None = None
    ) -> None:
        if sampled:
            self._counter.add(sampled)
        prompts = SampledTokens(sign * num * prompt_length, 0, sign * (num - 1) * prompt_length)
        with self._lock:
            counts = self._counts
            # One assignment, so that a reader of `counts` never finds a request counted twice or not at all.
            self._counts = ProgressCounts(
                counts.sampled + (sampled or SampledTokens()),
                counts.num_completions + (num if sampled else 0),
                counts.num_open + sign * num,
                counts.open_prompts + prompts,
                counts.max_open_tokens + sign * num * max_tokens,
            )

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop of the run, wait for its result, and make it cancellable.

        Raises:
            RolloutCancelledError: `cancel` was called.
        """
        with self._lock:
            if self._is_cancelled:
                coroutine.close()
                raise RolloutCancelledError
            self._running = running = start_coroutine(coroutine)
        try:
            return running.result()
        except BaseException as error:
            if self._is_cancelled and running.cancelled():
                raise RolloutCancelledError from error
            raise

    def cancel(self) -> None:
        """Cancel the coroutine of `run`; its environments clean up on the event loop."""
        with self._lock:
            self._is_cancelled = True
            if self._running:
                self._running.cancel()
