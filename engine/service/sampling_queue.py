"""Sampling queue of one base model: admits rows to the running batch and delivers results."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from engine.compute.base import BaseModel
from engine.compute.lora import Adapter
from engine.errors import BusyError, RequestError
from engine.memory.capacity import max_cache_bytes, max_pass_tokens
from engine.sampling.batch import Batch
from engine.sampling.job import SampleJob, SampleResult
from engine.sampling.request import Row, SamplingRequest
from engine.service.settings import Settings
from engine.service.worker import Worker

TURN_S = 0.05  # duration of a turn of decoding steps, before other work and new rows get a turn
MAX_ROWS = 256  # rows in the batch; more rows only make each step slower


class SamplingQueue:
    """Admits rows to the running batch, round-robin over clients, and computes the batch turn by turn."""

    def __init__(self, base: BaseModel, worker: Worker, settings: Settings, weight_bytes: int) -> None:
        """Open the queue of one model.

        Args:
            weight_bytes: size of the weights of all models of the engine.
        """
        self.base = base
        self._worker = worker
        self._owner = f"sampling:{base.loaded.name}"
        self._settings = settings
        self._pass_tokens = max_pass_tokens(settings, base, weight_bytes)
        self._cache_bytes = max_cache_bytes(settings, base, weight_bytes)
        self._batch = self._new_batch()
        self._waiting: dict[str, deque[Row]] = {}
        self._num_reserved = 0
        self.prefill_tokens_requested = 0
        self.prefill_tokens_computed = 0
        self._open: dict[SamplingRequest, tuple[str, asyncio.Future[SampleResult]]] = {}
        self._abandoned: set[SamplingRequest] = set()
        self._runner: asyncio.Task[None] | None = None

    def _new_batch(self) -> Batch:
        return Batch(self.base, self._cache_bytes, self._pass_tokens, deterministic=self._settings.deterministic)

    @property
    def is_busy(self) -> bool:
        return self._runner is not None

    def reserve(self, num_samples: int) -> None:
        """Count samples about to be requested. The caller calls `release` when they are done.

        One request may exceed the limit, so that the queue accepts requests of any size.

        Raises:
            BusyError: the limit is reached.
        """
        if self._num_reserved >= (limit := self._settings.max_waiting_samples):
            raise BusyError(
                f"{self._num_reserved} samples of {self.base.loaded.name} are unfinished, and the limit is {limit}: "
                "send this request again later."
            )
        self._num_reserved += num_samples

    def release(self, num_samples: int) -> None:
        self._num_reserved -= num_samples

    async def sample(self, client: str, job: SampleJob, load: Callable[[], Adapter | None]) -> SampleResult:
        """Run ``job``. Cancelling the caller stops the work.

        Args:
            client: the client's id; clients take turns.
            load: returns the adapter, on the compute thread.
        """
        adapter = await self._worker.run(load, self._owner)
        request = SamplingRequest(job, adapter)
        result: asyncio.Future[SampleResult] = asyncio.get_running_loop().create_future()
        self._open[request] = (client, result)
        self._waiting.setdefault(client, deque()).extend(request.rows)
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        try:
            return await result
        finally:
            self._close_request(request)

    def _close_request(self, request: SamplingRequest) -> None:
        client, _ = self._open.pop(request)
        if not request.done:
            self._abandoned.add(request)
            if rows := self._waiting.get(client):
                self._waiting[client] = deque(row for row in rows if row.request is not request)
        request.close()

    async def _run(self) -> None:
        """Compute turns until no request is open and the batch is empty."""
        while self._open or self._batch.rows:
            rows = self._next_rows()
            clients = {self._open[row.request][0] for row in (*self._batch.rows, *rows) if row.request in self._open}
            abandoned, self._abandoned = self._abandoned, set()
            try:
                turn = partial(self._turn, rows, abandoned)
                evicted = await self._worker.run(turn, self._owner, max(len(clients), 1))
            except Exception as error:  # noqa: BLE001 - each request raises it again
                self._fail(error)
                continue
            for row in evicted:
                if row.request in self._open:
                    self._waiting.setdefault(self._open[row.request][0], deque()).appendleft(row)
            self._deliver_results()
        self._runner = None

    def _next_rows(self) -> list[Row]:
        """Take waiting rows for one prefill, round-robin over clients.

        The limit on its tokens counts a shared prompt once, and not the tokens in the prefix cache.
        """
        rows: list[Row] = []
        prompts: set[object] = set()
        num_tokens = 0
        while self._waiting:
            client, waiting = next(iter(self._waiting.items()))
            del self._waiting[client]
            if not waiting:
                continue
            row = waiting[0]
            if row.prefill_key not in prompts:
                num_tokens += self._batch.num_new_tokens(row)
                prompts.add(row.prefill_key)
            full = len(self._batch.rows) + len(rows) >= MAX_ROWS or not self._batch.has_room([*rows, row])
            if full or (rows and num_tokens > self._pass_tokens):
                self._waiting = {client: waiting, **self._waiting}
                break
            rows.append(waiting.popleft())
            self._waiting[client] = waiting  # moves the client to the end
        return rows

    def _turn(self, new_rows: Sequence[Row], abandoned: set[SamplingRequest]) -> list[Row]:
        """Prefill new rows, or else decode for one turn; return evicted rows. For the compute thread."""
        started = perf_counter()
        self._batch.remove(lambda row: row.request in abandoned)
        if new_rows:
            num_requested = sum(row.num_tokens for row in new_rows)
            self.prefill_tokens_computed += self._batch.add(new_rows)
            self.prefill_tokens_requested += num_requested
            return []
        while self._batch.rows:
            if evicted := self._batch.make_room():
                return evicted
            self._batch.step()
            if perf_counter() - started > TURN_S:
                break
        return []

    def _deliver_results(self) -> None:
        for request, (_, result) in self._open.items():
            if result.done():
                continue
            if not request.is_finite:
                result.set_exception(
                    RequestError(
                        "These weights give logits that are not finite: sample from earlier weights, and train with a "
                        "lower learning rate."
                    )
                )
            elif request.done:
                result.set_result(request.result())

    def _fail(self, error: Exception) -> None:
        """Fail all open requests and start a new batch, because the state of the old one is unknown."""
        self._batch = self._new_batch()
        self._waiting = {}
        for _, result in self._open.values():
            if not result.done():
                result.set_exception(error)
