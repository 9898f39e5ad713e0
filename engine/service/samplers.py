"""Samplers, and the queue that batches what they are asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from engine.checkpoints.checkpoint import ADAPTER, Checkpoint
from engine.checkpoints.store import CheckpointStore
from engine.compute.base import BaseModel
from engine.compute.batches import micro_batches
from engine.compute.lora import Adapter
from engine.compute.trainer import copy_weights
from engine.errors import RequestError
from engine.sampling.generate import Generation
from engine.sampling.job import SampleJob, SampleResult
from engine.service.futures import Answer, Futures
from engine.service.worker import Worker
from engine.wire.sample import encode_result

MAX_CACHED_TOKENS = 32_768  # of one batch: bounds its key-value cache
STEPS_PER_TURN = 8  # tokens between two looks at what else waits for the compute thread


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    sampler: Sampler
    job: SampleJob
    result: asyncio.Future[SampleResult]


class SamplingQueue:
    """All sampling on one base model: whatever waits for the same weights is computed as one batch."""

    def __init__(self, base: BaseModel, worker: Worker, futures: Futures) -> None:
        self.base = base
        self.futures = futures
        self._worker = worker
        self._waiting: list[_Asked] = []
        self._runner: asyncio.Task[None] | None = None

    async def ask(self, sampler: Sampler, job: SampleJob) -> Answer:
        """Compute ``job``, together with what else is waiting."""
        result: asyncio.Future[SampleResult] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Asked(sampler, job, result))
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        return Answer(encode_result(await result))

    async def _run(self) -> None:
        while self._waiting:
            batch = self._next_batch()
            try:
                results = await self._generate(batch)
            except Exception as error:  # noqa: BLE001 - each request of the batch raises it again
                for asked in batch:
                    asked.result.set_exception(error)
                continue
            for asked, result in zip(batch, results, strict=True):
                asked.result.set_result(result)
        self._runner = None

    def _next_batch(self) -> list[_Asked]:
        """The oldest request's companions on the same weights, as many as fit beside it."""
        first = self._waiting[0]
        same = [asked for asked in self._waiting if asked.sampler is first.sampler]
        groups = micro_batches([asked.job.num_cached_tokens for asked in same], MAX_CACHED_TOKENS)
        (indices,) = (group for group in groups if 0 in group)
        batch = [same[index] for index in indices]
        self._waiting = [asked for asked in self._waiting if asked not in batch]
        return batch

    async def _generate(self, batch: list[_Asked]) -> list[SampleResult]:
        sampler = batch[0].sampler
        adapter = await self._worker.run(sampler.load)
        generation = Generation(self.base, adapter, [asked.job for asked in batch])
        while not generation.done:
            await self._worker.run(lambda: generation.advance(STEPS_PER_TURN))
        return generation.results()


class Sampler:
    """A sampling session of the protocol: fixed weights to sample from."""

    def __init__(
        self,
        sampler_id: str,
        base_name: str,
        queue: SamplingQueue,
        checkpoints: CheckpointStore,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.sampler_id = sampler_id
        self.base_name = base_name
        self.queue = queue
        self.checkpoint = checkpoint
        self.adapter: Adapter | None = None
        self.num_clients = 0
        self._checkpoints = checkpoints
        self._digests: dict[int, bytes] = {}

    def load(self) -> Adapter | None:
        """The adapter to sample with, read from its checkpoint on the first call; None is the base model."""
        if self.adapter is None and self.checkpoint is not None:
            weights = self._checkpoints.read(self.checkpoint, ADAPTER)
            adapter = self.queue.base.new_adapter(self.checkpoint.lora)
            copy_weights(weights, adapter)
            self.adapter = adapter
        return self.adapter

    def is_repeat(self, seq_id: int, digest: bytes) -> bool:
        """Note request ``seq_id``; whether it came before.

        Raises:
            RequestError: another one came under the same number.
        """
        known = self._digests.setdefault(seq_id, digest)
        if known != digest:
            raise RequestError(
                f"Request {seq_id} of {self.sampler_id} was already sent with other content: "
                "two clients share one sampler; give each its own."
            )
        return known is not digest
