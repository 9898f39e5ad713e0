"""Sampling sessions and sampling requests."""

from __future__ import annotations

from fastapi import APIRouter, Request
from tinker import types

from engine.errors import RequestError
from engine.routes.body import JsonObject, check_seq_id, digest, parse, read_id, read_json
from engine.routes.service import LONG_POLL_S
from engine.sampling.job import MAX_SAMPLES
from engine.service.engine import Engine
from engine.service.futures import WireResponse
from engine.service.metrics import Metrics
from engine.service.samplers import FinishedRequest, Sampler
from engine.wire.sample import decode_job, encode_result


def sampling_router(engine: Engine) -> APIRouter:
    """Return the routes of sampling sessions and completions."""
    router = APIRouter()
    limit = engine.settings.max_body_bytes

    @router.post("/create_sampling_session")
    async def create_sampling_session(request: Request) -> dict[str, str]:
        session_request = parse(types.CreateSamplingSessionRequest, await read_json(request, limit))
        sampler = engine.new_sampler(
            session_request.session_id,
            check_seq_id(session_request.sampling_session_seq_id, "sampling_session_seq_id"),
            session_request.base_model,
            session_request.model_path,
        )
        return {"sampling_session_id": sampler.sampler_id, "type": "create_sampling_session"}

    @router.post("/join_sampling_session")
    async def join_sampling_session(request: Request) -> JsonObject:
        content = await read_json(request, limit)
        sampler = engine.sampler(read_id(content, "sampling_session_id"))
        sampler.num_clients += 1
        return {"client_counter": sampler.num_clients, "type": "join_sampling_session"}

    @router.get("/samplers/{sampler_id}")
    async def get_sampler(sampler_id: str) -> JsonObject:
        sampler = engine.sampler(sampler_id)
        return {
            "sampler_id": sampler_id,
            # The SDK loads the tokenizer of a sampling client by this name.
            "base_model": engine.tokenizer_name(engine.base(sampler.base_name).loaded),
            "model_path": sampler.path,
        }

    @router.post("/asample")
    async def asample(request: Request) -> JsonObject:
        return _start_sample(engine, await read_json(request, limit))

    @router.post("/cancel_future")
    async def cancel_future(request: Request) -> dict[str, str]:
        request_id = read_id(await read_json(request, limit), "request_id")
        engine.sampler(request_id.rpartition(":")[0]).cancel(request_id)
        return {"type": "cancel_future"}

    @router.post("/retrieve_futures")
    async def retrieve_futures(request: Request) -> JsonObject:
        wait = parse(types.FuturesRetrieveRequest, await read_json(request, limit))
        sampler = engine.sampler(wait.target.sampling_session_id)
        timeout_s = LONG_POLL_S if wait.timeout is None else min(wait.timeout, LONG_POLL_S)
        finished, cursor = await sampler.finished_requests(wait.target.cloned_sampler_id).after(
            wait.prev_cursor, timeout_s
        )
        return {"completions": [_describe(finished_request) for finished_request in finished], "cursor": cursor}

    return router


def _start_sample(engine: Engine, content: JsonObject) -> JsonObject:
    sampler = engine.sampler(read_id(content, "sampling_session_id"))
    request = parse(types.SampleRequest, content)
    if request.seq_id is None:
        raise RequestError("asample has no seq_id: send it together with sampling_session_id.")
    if request.num_samples > MAX_SAMPLES:
        # The response has an id per sample, so check here: billions of ids would fill the memory.
        raise RequestError(f"num_samples is {request.num_samples}; use 1 to {MAX_SAMPLES}.")
    request_id = sampler.start(
        check_seq_id(request.seq_id, "seq_id"),
        digest("asample", content),
        engine.futures,
        request.num_samples,
        lambda: _sample(sampler, request, engine.metrics),
    )
    return {
        "request_id": request_id,
        "sample_sequence_ids": [f"{request_id}:{sample}" for sample in range(request.num_samples)],
    }


async def _sample(sampler: Sampler, request: types.SampleRequest, metrics: Metrics) -> WireResponse:
    queue = sampler.queue
    job = decode_job(request, queue.base.loaded)
    result = await queue.sample(sampler.sampler_id.partition(":")[0], job, sampler.load)
    metrics.count_tokens("prompt", len(job.prompt_T))
    metrics.count_tokens("sampled", sum(len(sequence.tokens) for sequence in result.sequences))
    return WireResponse(encode_result(result, request))


def _describe(finished: FinishedRequest) -> JsonObject:
    if finished.num_bytes is None:
        return {"state": "failed", "request_id": finished.request_id}
    return {
        "state": "finished",
        "request_id": finished.request_id,
        "response_payload_uncompressed_size": finished.num_bytes,
    }
