"""Samplers: fixed weights to sample from, and the requests to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from engine.compute.lora import Adapter
from engine.errors import RequestError
from engine.service.adapter_home import AdapterHome
from engine.service.completions import Completions
from engine.service.futures import Answer, Futures
from engine.service.sampling_queue import SamplingQueue

CLONE_IDS = 1_000_000_000  # each client of a sampler numbers its requests within a block of so many


class Sampler:
    """A sampling session of the protocol."""

    def __init__(
        self,
        sampler_id: str,
        base_name: str,
        queue: SamplingQueue,
        path: str | None,
        home: AdapterHome | None,
    ) -> None:
        """Args:
        path: of the checkpoint it samples from, if it is one.
        home: of its adapter; None is the base model.
        """
        self.sampler_id = sampler_id
        self.base_name = base_name
        self.queue = queue
        self.path = path
        self.num_clients = 0
        self._home = home
        self._digests: dict[int, bytes] = {}
        self._running: dict[str, asyncio.Task[Answer]] = {}
        self._completions: dict[int, Completions] = {}
        if home is not None:
            home.in_use = lambda: bool(self._running)

    def load(self) -> Adapter | None:
        """The adapter to sample with; None is the base model. For the compute thread."""
        return self._home.adapter() if self._home is not None else None

    def start(
        self, seq_id: int, digest: bytes, futures: Futures, num_samples: int, work: Callable[[], Awaitable[Answer]]
    ) -> str:
        """Begin request ``seq_id`` unless it came before; returns the request id to come back with.

        Raises:
            RequestError: another one came under the same number.
            BusyError: too many wait; this one is as if it had never come.
        """
        request_id = f"{self.sampler_id}:{seq_id}"
        known = self._digests.get(seq_id)
        if known is not None and known != digest:
            raise RequestError(
                f"Request {seq_id} of {self.sampler_id} was already sent with other content: "
                "two clients share one sampler; give each its own."
            )
        if known is None:
            self.queue.reserve(num_samples)
            self._digests[seq_id] = digest
            futures.open(request_id)
            self._run(request_id, futures, num_samples, work)
        return request_id

    def completions(self, clone: int) -> Completions:
        """The finished requests of one client of this sampler; 0 is the one that opened it."""
        return self._completions.setdefault(clone, Completions())

    def cancel(self, request_id: str) -> None:
        """Stop the work on a request, if there still is any."""
        if (task := self._running.get(request_id)) is not None:
            task.cancel()

    def close(self) -> None:
        """Stop all work and free the adapter."""
        for request_id in list(self._running):
            self.cancel(request_id)
        if self._home is not None:
            self._home.close()

    def _run(self, request_id: str, futures: Futures, num_samples: int, work: Callable[[], Awaitable[Answer]]) -> None:
        async def settle() -> Answer:
            return await futures.settle(request_id, work())

        def end(task: asyncio.Task[Answer]) -> None:
            del self._running[request_id]
            self.queue.release(num_samples)
            if task.cancelled():
                answer = Answer.failure("The request was cancelled.", "user")
                futures.finish(request_id, answer)
            else:
                answer = task.result()
            self.completions(int(request_id.rpartition(":")[2]) // CLONE_IDS).add(request_id, answer)

        self._running[request_id] = asyncio.create_task(settle())
        self._running[request_id].add_done_callback(end)
