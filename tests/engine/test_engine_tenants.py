"""Several training clients on one base model: their batches interleave without affecting each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from engine.compute.base import BaseModel
from engine.compute.datum import Datum
from engine.compute.lora import Adapter, LoraSpec
from engine.compute.loss import bind_loss
from engine.compute.train import exhaust, iterate_loss
from engine.routes.app import make_app
from engine.service.engine import CLIENT_TIMEOUT_S, Engine
from engine.service.settings import Settings
from engine.service.worker import Worker

LOSS = bind_loss("cross_entropy", {})


def data(seed: int, lengths: list[int]) -> list[Datum]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 256, (length + 1,), generator=generator) for length in lengths]
    return [Datum(row[:-1], row[1:], {"weights": torch.ones(len(row) - 1)}) for row in rows]


def gradient(adapter: Adapter) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in adapter.named_parameters() if p.grad is not None}


def test_interleaved_batches_equal_single_batches(base: BaseModel) -> None:
    """Logprobs and gradients of three adapters with interleaved micro-batches and sampling are bitwise equal."""
    batches = [data(seed, [5 + seed, 20, 9]) for seed in range(3)]
    together = [base.new_adapter(LoraSpec(rank=4, seed=seed)) for seed in range(3)]
    alone = [base.new_adapter(LoraSpec(rank=4, seed=seed)) for seed in range(3)]
    running = {n: iterate_loss(base, together[n], batches[n], LOSS, 16, backward=True) for n in range(3)}
    outputs = {}
    while running:
        for n, parts in list(running.items()):
            try:
                next(parts)
            except StopIteration as end:
                outputs[n] = end.value
                del running[n]
            with base.using(None), torch.inference_mode():
                base.hidden(batches[0][0].tokens_T[None])
    for n in range(3):
        expected = exhaust(iterate_loss(base, alone[n], batches[n], LOSS, 16, backward=True))
        for ours, theirs in zip(outputs[n].logprobs_D, expected.logprobs_D, strict=True):
            assert torch.equal(ours, theirs)
        ours, theirs = gradient(together[n]), gradient(alone[n])
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def request(model_id: str, num_datums: int) -> bytes:
    tokens = list(range(50))
    datum = types.Datum(types.ModelInput.from_ints(tokens), {"target_tokens": tokens})  # pyright: ignore[reportArgumentType]
    batch = types.ForwardBackwardInput([datum] * num_datums, "cross_entropy")
    return forward_backward_request_to_proto(types.ForwardBackwardRequest(batch, model_id, 1)).SerializeToString()


Use = Callable[[httpx.AsyncClient, Engine], Awaitable[None]]


def with_engine(base: BaseModel, folder: Path, use: Use, **settings: Any) -> None:
    """Run ``use`` with a client of an engine in this process, whose micro-batches have one datum of `request`."""

    async def main() -> None:
        engine = Engine(
            Settings(("tiny",), folder, folder, micro_batch_tokens=64, **settings), {"tiny": base}, Worker()
        )
        transport = httpx.ASGITransport(make_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/api/v1", timeout=60) as http:
            await use(http, engine)
        engine.worker.stop()

    asyncio.run(main())


async def create_models(http: httpx.AsyncClient, num_models: int) -> list[str]:
    """Open a session and create models in it."""
    session = (await http.post("create_session", json={})).json()["session_id"]
    models = []
    for number in range(num_models):
        content = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": 4}}
        created = (await http.post("create_model", json=content)).json()
        await http.post("retrieve_future", json={"request_id": created["request_id"]})
        models.append(created["model_id"])
    return models


async def send(http: httpx.AsyncClient, model_id: str, num_datums: int) -> str:
    headers = {"Content-Type": "application/x-protobuf"}
    response = await http.post("forward_backward", content=request(model_id, num_datums), headers=headers)
    return response.json()["request_id"]


def test_small_batch_does_not_wait_for_a_large_one(base: BaseModel, tmp_path: Path) -> None:
    """A request with one micro-batch gets its response while another client's 200 micro-batches are running."""

    async def use(http: httpx.AsyncClient, engine: Engine) -> None:
        (first,), (second,) = await create_models(http, 1), await create_models(http, 1)
        large, small = await send(http, first, 200), await send(http, second, 1)
        await http.post("retrieve_future", json={"request_id": small})
        assert engine.model(first).queue.running == 1
        result = await http.post("retrieve_future", json={"request_id": large})
        assert result.headers["content-type"] == "application/x-protobuf"

    with_engine(base, tmp_path, use)


def test_a_client_with_many_models_has_the_share_of_one(base: BaseModel, tmp_path: Path) -> None:
    """Four models of one client and one of another train on equal batches; the single one is the first to finish."""

    async def use(http: httpx.AsyncClient, engine: Engine) -> None:
        many, (single,) = await create_models(http, 4), await create_models(http, 1)
        for model_id in many:
            await send(http, model_id, 40)
        await http.post("retrieve_future", json={"request_id": await send(http, single, 40)})
        assert [engine.model(model_id).queue.running for model_id in many] == [1, 1, 1, 1]

    with_engine(base, tmp_path, use)


@pytest.mark.parametrize("is_finished", [True, False])
def test_the_request_of_a_client_that_is_gone_is_cancelled(base: BaseModel, tmp_path: Path, is_finished: bool) -> None:
    """The client finishes its session, or sends no heartbeat for a long time, while its request is running."""

    async def use(http: httpx.AsyncClient, engine: Engine) -> None:
        (gone,), (other,) = await create_models(http, 1), await create_models(http, 1)
        model, session = engine.model(gone), gone.partition(":")[0]
        await send(http, gone, 400)
        if is_finished:
            await http.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}})
        else:
            engine.sessions[session].last_seen -= CLIENT_TIMEOUT_S + 1
        await http.post("retrieve_future", json={"request_id": await send(http, other, 20)})
        assert model.queue.running is None
        assert session not in engine.sessions

    with_engine(base, tmp_path, use)


def test_a_request_has_a_limit_of_compute_time(base: BaseModel, tmp_path: Path) -> None:
    async def use(http: httpx.AsyncClient, engine: Engine) -> None:
        (model_id,) = await create_models(http, 1)
        result = await http.post("retrieve_future", json={"request_id": await send(http, model_id, 2)})
        assert result.json()["category"] == "user"
        assert "has computed for 0 s, and the limit is 0 s: send smaller batches" in result.json()["error"]
        (model_id,) = await create_models(http, 1)
        result = await http.post("retrieve_future", json={"request_id": await send(http, model_id, 1)})
        assert result.headers["content-type"] == "application/x-protobuf"

    with_engine(base, tmp_path, use, max_request_s=0.0)
