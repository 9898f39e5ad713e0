"""Samplers: fixed weights to sample from, and their requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from engine.compute.lora import Adapter
from engine.errors import RequestError
from engine.memory.adapter_store import AdapterStore
from engine.service.futures import PROTOBUF, Futures, WireResponse
from engine.service.sampling_queue import SamplingQueue

CLONE_IDS = 1_000_000_000  # each client of a sampler numbers its requests within its own block of this size


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Id of a finished request and the size of its result; `num_bytes` is None if the request failed."""

    request_id: str
    num_bytes: int | None


class FinishedRequests:
    """Finished requests of one client in the order they finished, numbered from 1.

    A client can wait for all its requests at once, by the number of the last one it has seen.
    """

    def __init__(self) -> None:
        self._unseen: list[FinishedRequest] = []
        self._num_seen = 0
        self._changed = asyncio.Event()

    def add(self, request_id: str, response: WireResponse) -> None:
        self._unseen.append(
            FinishedRequest(request_id, len(response.body) if response.media_type == PROTOBUF else None)
        )
        self._changed.set()

    async def after(self, cursor: int, timeout_s: float) -> tuple[Sequence[FinishedRequest], int]:
        """Return the requests after number ``cursor`` and the last number; wait up to ``timeout_s`` for the first.

        Requests up to ``cursor`` are dropped, because the client has seen them.
        """
        num_seen = min(max(cursor - self._num_seen, 0), len(self._unseen))
        self._unseen = self._unseen[num_seen:]
        self._num_seen += num_seen
        if not self._unseen and timeout_s > 0:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        return tuple(self._unseen), self._num_seen + len(self._unseen)


class Sampler:
    """Sampling session of the Tinker protocol."""

    def __init__(
        self,
        sampler_id: str,
        base_name: str,
        queue: SamplingQueue,
        path: str | None,
        adapter_store: AdapterStore | None,
    ) -> None:
        """Create a sampler.

        Args:
            path: path of its checkpoint; None for a snapshot or a base model.
            adapter_store: store of its adapter; None for a base model.
        """
        self.sampler_id = sampler_id
        self.base_name = base_name
        self.queue = queue
        self.path = path
        self.num_clients = 0
        self._adapter_store = adapter_store
        self._digests: dict[int, bytes] = {}
        self._running: dict[str, asyncio.Task[WireResponse]] = {}
        self._finished: dict[int, FinishedRequests] = {}
        if adapter_store is not None:
            adapter_store.in_use = lambda: bool(self._running)

    def load(self) -> Adapter | None:
        """Return the adapter to sample with; None is the base model. For the compute thread."""
        return self._adapter_store.adapter() if self._adapter_store is not None else None

    def start(
        self,
        seq_id: int,
        digest: bytes,
        futures: Futures,
        num_samples: int,
        work: Callable[[], Awaitable[WireResponse]],
    ) -> str:
        """Start request ``seq_id`` unless it is a repeat; return its request id.

        Raises:
            RequestError: another request has the same number.
            BusyError: too many samples are waiting; the request can be sent again unchanged.
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

    def finished_requests(self, clone: int) -> FinishedRequests:
        """Return the finished requests of one client of this sampler; client 0 opened the sampler."""
        return self._finished.setdefault(clone, FinishedRequests())

    def cancel(self, request_id: str) -> None:
        """Cancel a request if it is running."""
        if (task := self._running.get(request_id)) is not None:
            task.cancel()

    def close(self) -> None:
        """Cancel all requests and free the adapter."""
        for request_id in list(self._running):
            self.cancel(request_id)
        if self._adapter_store is not None:
            self._adapter_store.close()

    def _run(
        self, request_id: str, futures: Futures, num_samples: int, work: Callable[[], Awaitable[WireResponse]]
    ) -> None:
        """Start the work of a request in a task whose end releases the samples and records the response."""

        async def run() -> WireResponse:
            return await futures.run(request_id, work())

        def end(task: asyncio.Task[WireResponse]) -> None:
            del self._running[request_id]
            self.queue.release(num_samples)
            if task.cancelled():
                response = WireResponse.failure("The request was cancelled.", "user")
                futures.finish(request_id, response)
            else:
                response = task.result()
            self.finished_requests(int(request_id.rpartition(":")[2]) // CLONE_IDS).add(request_id, response)

        self._running[request_id] = asyncio.create_task(run())
        self._running[request_id].add_done_callback(end)
