"""Limits per client: rejections are sentences, and accepted requests are never lost."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.compute.base import BaseModel
from engine.errors import BusyError, RequestError
from engine.memory.capacity import max_adapter_bytes, max_cache_bytes, max_pass_tokens
from engine.part import ALONE, Part
from engine.service.engine import Engine
from engine.service.futures import Futures, WireResponse
from engine.service.history import ModelJournal
from engine.service.journal import Journal
from engine.service.metrics import Metrics
from engine.service.ordered_queue import Clock, OrderedQueue, QueuedRequest, QueueServices
from engine.service.sessions import SessionStore
from engine.service.settings import Settings
from engine.service.worker import Worker


def test_sessions_and_models_are_limited(base: BaseModel, tmp_path: Path) -> None:
    engine = Engine(Settings(("tiny",), tmp_path, tmp_path, max_sessions=2, max_models=1), {"tiny": base}, Worker())
    first, second = (engine.open_session({}, None) for _ in range(2))
    with pytest.raises(RequestError, match="its maximum of 2 sessions"):
        engine.open_session({}, None)
    engine.new_model(first.session_id, 0)
    with pytest.raises(RequestError, match="its maximum of 1 models in training"):
        engine.new_model(second.session_id, 0)
    assert engine.new_model(first.session_id, 0).model_id == f"{first.session_id}:train:0"
    engine.close_session(first.session_id, "success", None)
    engine.new_model(second.session_id, 0)
    engine.open_session({}, None)
    engine.stop()


def test_full_queue_accepts_only_the_next_request(tmp_path: Path) -> None:
    """The queue must accept the request that all others wait for."""
    finished: list[int] = []

    async def run() -> None:
        services = QueueServices(Futures(), Clock(0), Metrics(dict), max_waiting=2)
        queue = OrderedQueue("m", services, ModelJournal(Journal(tmp_path / "journal"), "m"))

        def request(seq_id: int) -> QueuedRequest:
            async def work() -> WireResponse:
                finished.append(seq_id)
                return WireResponse(b"")

            return QueuedRequest(seq_id, "forward_backward", bytes([seq_id]), True, work)

        queue.submit(request(1))
        queue.submit(request(2))
        with pytest.raises(BusyError, match="2 requests of m are waiting"):
            queue.submit(request(3))
        assert queue.submit(request(2)) == "m:2"
        queue.submit(request(0))
        while len(finished) < 3:
            await asyncio.sleep(0)
        queue.submit(request(3))
        while len(finished) < 4:
            await asyncio.sleep(0)

    asyncio.run(run())
    assert finished == [0, 1, 2, 3]


def test_failed_journal_write_removes_the_journal(tmp_path: Path) -> None:
    """A session with a missing step must not be restored."""
    store = SessionStore(tmp_path)
    session = store.open({}, None)
    descriptor = session.journal._file
    assert descriptor is not None
    os.close(descriptor)
    session.journal._file = os.open("/dev/full", os.O_WRONLY)
    session.journal.append({"type": "request"})
    assert not list(tmp_path.glob("sessions/*.jsonl"))
    session.journal.append({"type": "request"})
    assert not list(SessionStore(tmp_path).unfinished())


def test_session_of_a_running_engine_is_not_restored(base: BaseModel, tmp_path: Path) -> None:
    settings = Settings(("tiny",), tmp_path, tmp_path)
    first = Engine(settings, {"tiny": base}, Worker())
    session = first.open_session({"a": "b"}, "c")
    second = Engine(settings, {"tiny": base}, Worker())
    assert session.session_id not in second.sessions
    first.close_session(session.session_id, "errored", "d")
    third = Engine(settings, {"tiny": base}, Worker())
    summary = third.summary(session.session_id)
    assert (summary.user_metadata, summary.display_name, summary.reason, summary.detail) == (
        {"a": "b"}, "c", "errored", "d",
    )  # fmt: skip
    for engine in (first, second, third):
        engine.stop()


def test_no_fetch_waits_once_the_engine_stops() -> None:
    """Neither a fetch that waits already, nor one that arrives later, with or without an earlier one."""

    async def stop(*, has_waiter: bool) -> None:
        futures = Futures()
        futures.open("request")
        waiter = asyncio.ensure_future(futures.fetch("request", 600.0)) if has_waiter else None
        await asyncio.sleep(0)
        futures.release_waiters()
        if waiter:
            assert await waiter is None
        assert await futures.fetch("request", 600.0) is None

    for has_waiter in (True, False):
        asyncio.run(stop(has_waiter=has_waiter))


def test_engines_on_one_device_share_its_memory(base: BaseModel, tmp_path: Path) -> None:
    alone, half = (
        max_adapter_bytes(Settings(("tiny",), tmp_path, tmp_path, part=part), base, base.num_bytes)
        for part in (ALONE, Part(1, 3, 2))
    )
    assert half == alone // 2


def test_models_on_a_gpu_share_the_memory_that_their_weights_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches, adapters, a pass and the captured passes of each model fit beside two models."""
    gib = 2**30
    properties = SimpleNamespace(total_memory=80 * gib)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    base: Any = SimpleNamespace(device=torch.device("cuda"), bytes_per_trained_token=2**20)
    settings = Settings(("first", "second"), tmp_path, tmp_path)
    weight_bytes = 2 * 30 * gib
    num_cache_bytes = 2 * max_cache_bytes(settings, base, weight_bytes)
    num_adapter_bytes = max_adapter_bytes(settings, base, weight_bytes)
    num_pass_bytes = max_pass_tokens(settings, base, weight_bytes) * base.bytes_per_trained_token
    assert (num_cache_bytes, num_adapter_bytes, num_pass_bytes) == (5 * gib, 5 * gib, 2 * gib)
    assert weight_bytes + num_cache_bytes + num_adapter_bytes + (1 + 2) * num_pass_bytes * 5 / 4 < 80 * gib
