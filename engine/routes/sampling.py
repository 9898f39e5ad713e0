"""Sampling sessions and sampling requests."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from tinker import types

from engine.errors import RequestError
from engine.routes.body import digest, parse, read_json
from engine.routes.service import LONG_POLL_S
from engine.sampling.job import MAX_SAMPLES
from engine.service.completions import Completion
from engine.service.engine import Engine
from engine.service.futures import Answer
from engine.service.metrics import Metrics
from engine.service.samplers import Sampler
from engine.wire.sample import decode_job, encode_result


def sampling_router(engine: Engine) -> APIRouter:
    router = APIRouter()
    limit = engine.settings.max_body_bytes

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
            # The SDK loads a sampling client's tokenizer by this name.
            "base_model": engine.tokenizer_name(engine.base(sampler.base_name).loaded),
            "model_path": sampler.path,
        }

    @router.post("/asample")
    async def asample(request: Request) -> dict[str, Any]:
        return _start_sample(engine, await read_json(request, limit))

    @router.post("/cancel_future")
    async def cancel_future(request: Request) -> dict[str, str]:
        request_id = str((await read_json(request, limit)).get("request_id"))
        engine.sampler(request_id.rpartition(":")[0]).cancel(request_id)
        return {"type": "cancel_future"}

    @router.post("/retrieve_futures")
    async def retrieve_futures(request: Request) -> dict[str, Any]:
        asked = parse(types.FuturesRetrieveRequest, await read_json(request, limit))
        completions = engine.sampler(asked.target.sampling_session_id).completions(asked.target.cloned_sampler_id)
        timeout_s = LONG_POLL_S if asked.timeout is None else min(asked.timeout, LONG_POLL_S)
        finished, cursor = await completions.after(asked.prev_cursor, timeout_s)
        return {"completions": [_describe(done) for done in finished], "cursor": cursor}

    return router


def _start_sample(engine: Engine, content: dict[str, Any]) -> dict[str, Any]:
    sampler = engine.sampler(str(content.get("sampling_session_id")))
    asked = parse(types.SampleRequest, content)
    if asked.seq_id is None:
        raise RequestError("asample needs a seq_id beside its sampling_session_id.")
    if asked.num_samples > MAX_SAMPLES:
        # Each sample has an id in the answer: billions of them would fill the memory before the job is looked at.
        raise RequestError(f"num_samples is {asked.num_samples}; give 1 to {MAX_SAMPLES}.")
    request_id = sampler.start(
        asked.seq_id,
        digest("asample", content),
        engine.futures,
        asked.num_samples,
        lambda: _sample(sampler, asked, engine.metrics),
    )
    return {
        "request_id": request_id,
        "sample_sequence_ids": [f"{request_id}:{sample}" for sample in range(asked.num_samples)],
    }


async def _sample(sampler: Sampler, asked: types.SampleRequest, metrics: Metrics) -> Answer:
    queue = sampler.queue
    job = decode_job(asked, queue.base.loaded)
    result = await queue.ask(sampler.sampler_id.partition(":")[0], job, sampler.load)
    metrics.tokens("prompt", len(job.prompt_T))
    metrics.tokens("sampled", sum(len(sequence.tokens) for sequence in result.sequences))
    return Answer(encode_result(result, asked.target_prompt_logprobs))


def _describe(done: Completion) -> dict[str, Any]:
    if done.num_bytes is None:
        return {"state": "failed", "request_id": done.request_id}
    return {
        "state": "finished",
        "request_id": done.request_id,
        "response_payload_uncompressed_size": done.num_bytes,
    }
