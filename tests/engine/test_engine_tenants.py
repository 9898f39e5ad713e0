"""Several training clients on one base model: their batches interleave without affecting each other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from engine.compute.base import BaseModel
from engine.compute.datum import Datum
from engine.compute.lora import Adapter, LoraSpec
from engine.compute.loss import bind_loss
from engine.compute.train import exhaust, iterate_loss
from engine.routes.app import make_app
from engine.service.engine import Engine
from engine.service.settings import Settings

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


def test_small_batch_does_not_wait_for_a_large_one(base: BaseModel, tmp_path: Path) -> None:
    """A request with one micro-batch gets its response while another client's 200 micro-batches are running."""

    async def main() -> int | None:
        settings = Settings(models=("tiny",), state=tmp_path, cache=tmp_path, micro_batch_tokens=64)
        engine = Engine(settings, {"tiny": base})
        transport = httpx.ASGITransport(make_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/api/v1", timeout=60) as http:
            models = []
            for _ in range(2):
                session = (await http.post("create_session", json={})).json()["session_id"]
                content = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
                created = (await http.post("create_model", json=content)).json()
                await http.post("retrieve_future", json={"request_id": created["request_id"]})
                models.append(created["model_id"])
            sent = []
            for model_id, num_datums in zip(models, (200, 1), strict=True):
                body = request(model_id, num_datums)
                headers = {"Content-Type": "application/x-protobuf"}
                response = await http.post("forward_backward", content=body, headers=headers)
                sent.append(response.json()["request_id"])
            await http.post("retrieve_future", json={"request_id": sent[1]})
            still_running = engine.model(models[0]).queue.running
            large = await http.post("retrieve_future", json={"request_id": sent[0]})
            assert large.headers["content-type"] == "application/x-protobuf"
        engine.worker.stop()
        return still_running

    assert asyncio.run(main()) == 1
