"""Sampling on one base model: who waits, who joins the running batch, who gets a result."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from engine.compute.base import BaseModel
from engine.compute.lora import Adapter
from engine.errors import BusyError
from engine.sampling.batch import Batch
from engine.sampling.job import SampleJob, SampleResult
from engine.sampling.request import Request, Row
from engine.service.settings import Settings
from engine.service.worker import Worker

TURN_S = 0.05  # of steps, at least one, before others and newcomers have their turn
MAX_ROWS = 256  # in the batch: beyond it a step only takes longer


class SamplingQueue:
    """Lets rows into the running batch as it has room, in turn among clients, and computes it turn by turn."""

    def __init__(self, base: BaseModel, worker: Worker, settings: Settings) -> None:
        self.base = base
        self._worker = worker
        self._owner = f"sampling:{base.loaded.name}"
        self._settings = settings
        self._batch = self._new_batch()
        self._waiting: dict[str, deque[Row]] = {}
        self._num_reserved = 0
        self._open: dict[Request, tuple[str, asyncio.Future[SampleResult]]] = {}
        self._left: set[Request] = set()
        self._runner: asyncio.Task[None] | None = None

    def _new_batch(self) -> Batch:
        settings = self._settings
        return Batch(
            self.base,
            settings.sampling_cache_bytes,
            settings.micro_batch_tokens,
            deterministic=settings.deterministic,
        )

    @property
    def is_busy(self) -> bool:
        return self._runner is not None

    def reserve(self, num_samples: int) -> None:
        """Count samples in that are to be asked for; whoever does it takes them out by `release`.

        Raises:
            BusyError: as many are waited for as may be.
        """
        if self._num_reserved >= (limit := self._settings.max_waiting_samples):
            raise BusyError(
                f"{self._num_reserved} samples of {self.base.loaded.name} are waited for, and no more than {limit} may "
                "be: ask again in a second."
            )
        self._num_reserved += num_samples

    def release(self, num_samples: int) -> None:
        self._num_reserved -= num_samples

    async def ask(self, client: str, job: SampleJob, load: Callable[[], Adapter | None]) -> SampleResult:
        """Compute ``job``; whoever stops waiting for it stops the work.

        Args:
            client: for whom; rows of different clients join in turn.
            load: what gives the adapter, on the compute thread.
        """
        adapter = await self._worker.run(load, self._owner)
        request = Request(job, adapter)
        result: asyncio.Future[SampleResult] = asyncio.get_running_loop().create_future()
        self._open[request] = (client, result)
        self._waiting.setdefault(client, deque()).extend(request.rows)
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        try:
            return await result
        finally:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        client, _ = self._open.pop(request)
        if not request.done:
            self._left.add(request)
            if rows := self._waiting.get(client):
                self._waiting[client] = deque(row for row in rows if row.request is not request)

    async def _run(self) -> None:
        while self._open or self._batch.rows:
            rows = self._next_rows()
            clients = {self._open[row.request][0] for row in (*self._batch.rows, *rows) if row.request in self._open}
            left, self._left = self._left, set()
            try:
                out = await self._worker.run(partial(self._turn, rows, left), self._owner, max(len(clients), 1))
            except Exception as error:  # noqa: BLE001 - each request raises it again
                self._fail(error)
                continue
            for row in out:
                if row.request in self._open:
                    self._waiting.setdefault(self._open[row.request][0], deque()).appendleft(row)
            self._answer()
        self._runner = None

    def _next_rows(self) -> list[Row]:
        """As many rows as one forward pass reads, one of each client in turn."""
        rows: list[Row] = []
        num_tokens = 0
        while self._waiting:
            client, waiting = next(iter(self._waiting.items()))
            del self._waiting[client]
            if not waiting:
                continue
            row = waiting[0]
            num_tokens += row.num_tokens
            full = len(self._batch.rows) + len(rows) >= MAX_ROWS or not self._batch.fits([*rows, row])
            if full or (rows and num_tokens > self._settings.micro_batch_tokens):
                self._waiting = {client: waiting, **self._waiting}
                break
            rows.append(waiting.popleft())
            self._waiting[client] = waiting  # behind the others
        return rows

    def _turn(self, rows: Sequence[Row], left: set[Request]) -> list[Row]:
        """On the compute thread: newcomers first, so that the steps that follow are for all of them."""
        started = perf_counter()
        self._batch.leave(lambda row: row.request in left)
        if rows:
            self._batch.join(rows)
            return []
        while self._batch.rows:
            if out := self._batch.make_room():
                return out
            self._batch.step()
            if perf_counter() - started > TURN_S:
                break
        return []

    def _answer(self) -> None:
        for request, (_, result) in self._open.items():
            if request.done and not result.done():
                result.set_result(request.result())

    def _fail(self, error: Exception) -> None:
        """What the batch holds cannot be trusted any more."""
        self._batch = self._new_batch()
        self._waiting = {}
        for _, result in self._open.values():
            if not result.done():
                result.set_exception(error)
