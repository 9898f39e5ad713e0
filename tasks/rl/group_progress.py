"""Tokens that the rollout of a group has sampled so far, and its cancellation."""

from __future__ import annotations

from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

from tasks.common.event_loop import start_coroutine
from tasks.training.batch_source import SampledTokens

T = TypeVar("T")


class RolloutCancelledError(Exception):
    """The rollout of a group was cancelled because its step needs no more groups."""


@dataclass(frozen=True, slots=True)
class OpenRequests:
    """Requests that the service has not answered yet.

    Attributes:
        num_completions: completions that they ask for.
        num_prompt_tokens: their prompt tokens, once for each completion.
        num_cached_tokens: part of the prompt tokens that the service bills as cache hits.
        max_tokens: most tokens that they can sample.
    """

    num_completions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    max_tokens: int = 0

    def plus(self, num: int, prompt_length: int, max_tokens: int, sign: int = 1) -> OpenRequests:
        """Return the requests with one more for `num` completions of a prompt, or one less if `sign` is -1."""
        return OpenRequests(
            self.num_completions + sign * num,
            self.num_prompt_tokens + sign * num * prompt_length,
            self.num_cached_tokens + sign * (num - 1) * prompt_length,
            self.max_tokens + sign * num * max_tokens,
        )


class GroupProgress:
    """Tokens that the rollout of a group has sampled so far in all attempts, and its cancellation.

    Only the event loop of the run counts; any thread may read the counts or cancel.

    Attributes:
        sampled: tokens of all responses.
        num_completions: completions of all responses.
        open: requests without a response.
    """

    def __init__(self) -> None:
        self.sampled = SampledTokens()
        self.num_completions = 0
        self.open = OpenRequests()
        self._lock = Lock()
        self._running: Future[Any] | None = None
        self._is_cancelled = False

    def start_request(self, num: int, prompt_length: int, max_tokens: int) -> None:
        """Count a request for `num` completions of a prompt."""
        self.open = self.open.plus(num, prompt_length, max_tokens)

    def end_request(self, num: int, prompt_length: int, max_tokens: int) -> None:
        """Count the end of a request, with or without a response."""
        self.open = self.open.plus(num, prompt_length, max_tokens, sign=-1)

    def add(self, sampled: SampledTokens, num_completions: int) -> None:
        """Count the tokens of a response."""
        self.sampled += sampled
        self.num_completions += num_completions

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
