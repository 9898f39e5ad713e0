"""Training routes. Each route returns a request id, with which the client fetches the result or error.

A client uses up a seq id for every request, even for a rejected one, and a missing seq id blocks all later requests.
The routes of a model therefore queue every request that they can, and return its errors as results. They reject a
request immediately only if its body is unreadable or too large, its ids are invalid, its model is not open, or the
model's queue is full. In the last case the client sends the request again with the same seq id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import APIRouter, Request
from tinker import types
from tinker.types import AdamParams

from engine.errors import RequestError
from engine.routes.body import (
    JsonObject,
    check_metadata,
    check_seq_id,
    digest,
    parse,
    read_body,
    read_id,
    read_json,
    read_seq_id,
)
from engine.service.engine import Engine
from engine.service.futures import WireResponse
from engine.service.ordered_queue import QueuedRequest
from engine.service.training import SaveRequest, TrainingModel
from engine.wire.forward_backward import decode_request

LARGE_BODY_BYTES = 2**20  # a smaller body is parsed within milliseconds
MAX_CUSTOM_LOSS_BYTES = 4 * 2**20  # enough for a graph of 1,000 nodes with long arguments

Work = Callable[[TrainingModel, JsonObject], Awaitable[WireResponse]]


def training_router(engine: Engine) -> APIRouter:
    """Return the router of the training requests."""
    router = APIRouter()
    limit = engine.settings.max_body_bytes

    @router.post("/forward_backward")
    async def forward_backward(request: Request) -> dict[str, str]:
        body = await read_body(request, limit)
        large = len(body) > LARGE_BODY_BYTES
        decoded = await asyncio.to_thread(decode_request, body) if large else decode_request(body)
        model = engine.model(decoded.model_id)
        kind = "forward" if decoded.forward_only else "forward_backward"
        request_id = model.queue.submit(
            QueuedRequest(
                decoded.seq_id,
                kind,
                decoded.digest,
                not decoded.forward_only,
                lambda: model.forward_backward(decoded),
            )
        )
        return {"request_id": request_id, "model_id": model.model_id}

    async def queue(request: Request, work: Work) -> dict[str, str]:
        content = await read_json(request, limit)
        model = engine.model(read_id(content, "model_id"))
        kind = request.url.path.rpartition("/")[2]
        request_id = model.queue.submit(
            QueuedRequest(
                read_seq_id(content, "seq_id"),
                kind,
                digest(request.url.path, content),
                kind == "optim_step",
                lambda: work(model, content),
            )
        )
        return {"request_id": request_id, "model_id": model.model_id}

    @router.post("/optim_step")
    async def optim_step(request: Request) -> dict[str, str]:
        return await queue(request, _optim_step)

    @router.post("/save_weights")
    async def save_weights(request: Request) -> dict[str, str]:
        return await queue(request, _save)

    @router.post("/save_weights_external")
    async def save_weights_external(request: Request) -> dict[str, str]:
        return await queue(request, _save_external)

    @router.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(request: Request) -> dict[str, str]:
        return await queue(request, partial(_save_for_sampler, engine))

    @router.post("/create_custom_loss")
    async def create_custom_loss(request: Request) -> dict[str, str]:
        content = await read_json(request, min(MAX_CUSTOM_LOSS_BYTES, limit))
        session = engine.session(read_id(content, "session_id"))
        read_seq_id(content, "custom_loss_seq_id")  # raises if it is out of range
        # Derive the request id from the content: a resent request gets the same id, and a different request a new one.
        request_id = f"{session.session_id}:loss:{digest(request.url.path, content).hex()}"

        async def create() -> WireResponse:
            loss_id = engine.custom_losses.create(content, parse(types.CreateCustomLossRequest, content))
            return WireResponse.json({"loss_id": loss_id, "type": "create_custom_loss"})

        engine.futures.open(request_id)
        await engine.futures.run(request_id, create())
        return {"request_id": request_id}

    return router


async def _optim_step(model: TrainingModel, content: JsonObject) -> WireResponse:
    params = parse(types.OptimStepRequest, content).optim_params
    if not isinstance(params, AdamParams):
        raise RequestError(f"This engine does not support the optimizer {params.type!r}: use AdamParams.")
    return await model.optim_step(params)


async def _save(model: TrainingModel, content: JsonObject) -> WireResponse:
    request = parse(types.SaveWeightsRequest, content)
    return await model.save(
        SaveRequest(
            "weights", request.path, request.overwrite, request.ttl_seconds, check_metadata(request.user_metadata)
        )
    )


async def _save_for_sampler(engine: Engine, model: TrainingModel, content: JsonObject) -> WireResponse:
    request = parse(types.SaveWeightsForSamplerRequest, content)
    if request.path is not None:
        # Always overwrite: this SDK call has no overwrite option, and a resumed run saves under the same names again.
        return await model.save(
            SaveRequest(
                "sampler_weights", request.path, True, request.ttl_seconds, check_metadata(request.user_metadata)
            )
        )
    if request.sampling_session_seq_id is None:
        raise RequestError("save_weights_for_sampler has neither path nor sampling_session_seq_id: send one of them.")
    seq_id = check_seq_id(request.sampling_session_seq_id, "sampling_session_seq_id")
    sampler = await engine.new_snapshot_sampler(model, seq_id)
    return WireResponse.json({"sampling_session_id": sampler.sampler_id})


async def _save_external(model: TrainingModel, content: JsonObject) -> WireResponse:
    request = parse(types.SaveWeightsExternalRequest, content)
    recipients = request.age_encryption_recipients or ()
    return await model.save(SaveRequest("external_weights", request.path, True, request.ttl_seconds, {}, recipients))
