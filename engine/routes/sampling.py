"""Sampling sessions and sampling requests."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from tinker import types

from engine.errors import RequestError
from engine.routes.body import digest, parse, read_json
from engine.service.engine import Engine
from engine.service.futures import Answer
from engine.service.samplers import Sampler
from engine.wire.sample import decode_job


def sampling_router(engine: Engine) -> APIRouter:
    router = APIRouter()
    limit = engine.settings.max_body_bytes
    running: set[asyncio.Task[None]] = set()

    @router.post("/create_sampling_session")
    async def create_sampling_session(request: Request) -> dict[str, str]:
        asked = parse(types.CreateSamplingSessionRequest, await read_json(request, limit))
        sampler = engine.new_sampler(
            asked.session_id, asked.sampling_session_seq_id, asked.base_model, asked.model_path
        )
        return {"sampling_session_id": sampler.sampler_id, "type": "create_sampling_session"}

    @router.post("/join_sampling_session")
    async def join_sampling_session(request: Request) -> dict[str, Any]:
        content = await read_json(request, limit)
        sampler = engine.sampler(str(content.get("sampling_session_id")))
        sampler.num_clients += 1
        return {"client_counter": sampler.num_clients, "type": "join_sampling_session"}

    @router.get("/samplers/{sampler_id}")
    async def get_sampler(sampler_id: str) -> dict[str, Any]:
        sampler = engine.sampler(sampler_id)
        return {
            "sampler_id": sampler_id,
            # The SDK loads a sampling client's tokenizer by this name; a directory is one it finds offline.
            "base_model": str(engine.base(sampler.base_name).loaded.path),
            "model_path": sampler.checkpoint.name.path if sampler.checkpoint else None,
        }

    @router.post("/asample")
    async def asample(request: Request) -> dict[str, Any]:
        content = await read_json(request, limit)
        sampler = engine.sampler(str(content.get("sampling_session_id")))
        asked = parse(types.SampleRequest, content)
        if asked.seq_id is None:
            raise RequestError("asample needs a seq_id beside its sampling_session_id.")
        request_id = f"{sampler.sampler_id}:{asked.seq_id}"
        if not sampler.is_repeat(asked.seq_id, digest("asample", content)):
            engine.futures.open(request_id)
            task = asyncio.create_task(engine.futures.settle(request_id, _sample(sampler, asked)))
            running.add(task)
            task.add_done_callback(running.discard)
        return {
            "request_id": request_id,
            "sample_sequence_ids": [f"{request_id}:{sample}" for sample in range(asked.num_samples)],
        }

    return router


async def _sample(sampler: Sampler, asked: types.SampleRequest) -> Answer:
    return await sampler.queue.ask(sampler, decode_job(asked, sampler.queue.base.loaded))
