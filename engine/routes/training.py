"""Training requests. Each answers at once with a request id; whatever is wrong with it comes with the result.

A client spends a seq id on every request, accepted or not, so a refusal here would leave a gap that holds up
all that follow: only requests that name no living model are refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from tinker import types
from tinker.types import AdamParams

from engine.errors import RequestError
from engine.routes.body import digest, number, parse, read_body, read_json
from engine.service.engine import Engine
from engine.service.futures import Answer
from engine.service.ordered import Request
from engine.service.training import SaveRequest, TrainingModel
from engine.wire.forward_backward import decode_request

Work = Callable[[TrainingModel, dict[str, Any]], Awaitable[Answer]]


def training_router(engine: Engine) -> APIRouter:
    router = APIRouter()
    limit = engine.settings.max_body_bytes

    @router.post("/forward_backward")
    async def forward_backward(request: HttpRequest) -> dict[str, str]:
        decoded = decode_request(await read_body(request, limit))
        model = engine.model(decoded.model_id)
        kind = "forward" if decoded.forward_only else "forward_backward"
        request_id = model.queue.submit(
            Request(
                decoded.seq_id,
                kind,
                decoded.digest,
                not decoded.forward_only,
                lambda: model.forward_backward(decoded),
            )
        )
        return {"request_id": request_id, "model_id": model.model_id}

    async def queue(request: HttpRequest, work: Work) -> dict[str, str]:
        content = await read_json(request, limit)
        model = engine.model(str(content.get("model_id")))
        kind = request.url.path.rpartition("/")[2]
        request_id = model.queue.submit(
            Request(
                number(content, "seq_id"),
                kind,
                digest(request.url.path, content),
                kind == "optim_step",
                lambda: work(model, content),
            )
        )
        return {"request_id": request_id, "model_id": model.model_id}

    @router.post("/optim_step")
    async def optim_step(request: HttpRequest) -> dict[str, str]:
        return await queue(request, _optim_step)

    @router.post("/save_weights")
    async def save_weights(request: HttpRequest) -> dict[str, str]:
        return await queue(request, _save)

    @router.post("/save_weights_external")
    async def save_weights_external(request: HttpRequest) -> dict[str, str]:
        return await queue(request, _save_external)

    @router.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(request: HttpRequest) -> dict[str, str]:
        return await queue(request, partial(_save_for_sampler, engine))

    return router


async def _optim_step(model: TrainingModel, content: dict[str, Any]) -> Answer:
    params = parse(types.OptimStepRequest, content).optim_params
    if not isinstance(params, AdamParams):
        raise RequestError(f"The optimizer {params.type!r} is not offered by this engine: use AdamParams.")
    return await model.optim_step(params)


async def _save(model: TrainingModel, content: dict[str, Any]) -> Answer:
    asked = parse(types.SaveWeightsRequest, content)
    return await model.save(
        SaveRequest("weights", asked.path, asked.overwrite, asked.ttl_seconds, asked.user_metadata or {})
    )


async def _save_for_sampler(engine: Engine, model: TrainingModel, content: dict[str, Any]) -> Answer:
    asked = parse(types.SaveWeightsForSamplerRequest, content)
    if asked.path is not None:
        # The SDK has no overwrite here, and writes the same names again after a resume.
        return await model.save(
            SaveRequest("sampler_weights", asked.path, True, asked.ttl_seconds, asked.user_metadata or {})
        )
    if asked.sampling_session_seq_id is None:
        raise RequestError("save_weights_for_sampler needs a path or a sampling_session_seq_id.")
    sampler = await engine.new_snapshot_sampler(model, asked.sampling_session_seq_id)
    return Answer.json({"sampling_session_id": sampler.sampler_id})


async def _save_external(model: TrainingModel, content: dict[str, Any]) -> Answer:
    asked = parse(types.SaveWeightsExternalRequest, content)
    recipients = asked.age_encryption_recipients or ()
    return await model.save(SaveRequest("external_weights", asked.path, True, asked.ttl_seconds, {}, recipients))
