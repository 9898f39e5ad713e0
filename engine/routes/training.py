"""Training requests. Each answers at once with a request id; whatever is wrong with it comes with the result.

A client spends a seq id on every request, accepted or not, so a refusal here would leave a gap that holds up
all that follow: only requests that name no living model are refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from tinker import types
from tinker.types import AdamParams

from engine.compute.lora import LoraSpec
from engine.errors import RequestError
from engine.routes.body import digest, parse, read_body, read_json
from engine.service.engine import Engine
from engine.service.futures import Answer
from engine.service.training import SaveRequest, TrainingModel
from engine.wire.forward_backward import decode_request

Work = Callable[[TrainingModel, dict[str, Any]], Awaitable[Answer]]


def training_router(engine: Engine) -> APIRouter:
    router = APIRouter()
    limit = engine.settings.max_body_bytes

    @router.post("/forward_backward")
    async def forward_backward(request: Request) -> dict[str, str]:
        decoded = decode_request(await read_body(request, limit))
        model = engine.model(decoded.model_id)
        request_id = model.queue.submit(
            decoded.seq_id, decoded.digest, lambda: model.forward_backward(decoded)
        )
        return {"request_id": request_id, "model_id": model.model_id}

    async def queue(request: Request, work: Work) -> dict[str, str]:
        content = await read_json(request, limit)
        model = engine.model(str(content.get("model_id")))
        request_id = model.queue.submit(
            _number(content, "seq_id"), digest(request.url.path, content), lambda: work(model, content)
        )
        return {"request_id": request_id, "model_id": model.model_id}

    @router.post("/create_model")
    async def create_model(request: Request) -> dict[str, str]:
        content = await read_json(request, limit)
        model = engine.new_model(str(content.get("session_id")), _number(content, "model_seq_id"))
        request_id = model.queue.submit(0, digest(request.url.path, content), lambda: _create(model, content))
        return {"request_id": request_id, "model_id": model.model_id}

    @router.post("/load_weights")
    async def load_weights(request: Request) -> dict[str, str]:
        content = await read_json(request, limit)
        if content.get("session_id") is None:
            model = engine.model(str(content.get("model_id")))
            seq_id, work = _number(content, "seq_id"), _load
        else:
            model = engine.new_model(str(content["session_id"]), _number(content, "model_seq_id"))
            seq_id, work = 0, _create_from
        request_id = model.queue.submit(
            seq_id, digest(request.url.path, content), lambda: work(model, content)
        )
        return {"request_id": request_id, "model_id": model.model_id}

    @router.post("/optim_step")
    async def optim_step(request: Request) -> dict[str, str]:
        return await queue(request, _optim_step)

    @router.post("/save_weights")
    async def save_weights(request: Request) -> dict[str, str]:
        return await queue(request, _save)

    @router.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(request: Request) -> dict[str, str]:
        async def save(model: TrainingModel, content: dict[str, Any]) -> Answer:
            asked = parse(types.SaveWeightsForSamplerRequest, content)
            if asked.path is not None:
                # The SDK has no overwrite here, and writes the same names again after a resume.
                return await model.save(
                    SaveRequest(
                        "sampler_weights", asked.path, True, asked.ttl_seconds, asked.user_metadata or {}
                    )
                )
            if asked.sampling_session_seq_id is None:
                raise RequestError("save_weights_for_sampler needs a path or a sampling_session_seq_id.")
            sampler = await engine.new_snapshot_sampler(model, asked.sampling_session_seq_id)
            return Answer.json({"sampling_session_id": sampler.sampler_id})

        return await queue(request, save)

    @router.post("/get_info")
    async def get_info(request: Request) -> dict[str, Any]:
        model = engine.model(str((await read_json(request, limit)).get("model_id")))
        loaded = model.trainer.base.loaded
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_data": {
                "arch": loaded.model.config.model_type,
                "model_name": model.base_name,
                "tokenizer_id": str(loaded.path),
            },
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": model.trainer.adapter.spec.rank,
        }

    return router


async def _create(model: TrainingModel, content: dict[str, Any]) -> Answer:
    asked = parse(types.CreateModelRequest, content)
    _check_optimizer(asked.optimizer_config)
    if asked.lora_config is None:
        raise RequestError(
            "create_model came without lora_config, but this engine trains LoRA adapters only."
        )
    lora = asked.lora_config
    spec = LoraSpec(
        rank=lora.rank,
        seed=lora.seed if lora.seed is not None else _seed_of(model.model_id),
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )
    return await model.create(asked.base_model, spec, asked.user_metadata or {})


async def _create_from(model: TrainingModel, content: dict[str, Any]) -> Answer:
    asked = parse(types.LoadWeightsRequest, content)
    _check_optimizer(asked.optimizer_config)
    return await model.create_from(asked.path, asked.optimizer, asked.base_model, asked.user_metadata or {})


async def _load(model: TrainingModel, content: dict[str, Any]) -> Answer:
    asked = parse(types.LoadWeightsRequest, content)
    return await model.load(asked.path, asked.optimizer)


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


def _check_optimizer(config: types.OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise RequestError(f"The optimizer {config.type!r} is not offered by this engine: use adamw.")


def _seed_of(model_id: str) -> int:
    """A seed for a client that gave none; it is saved with the model, so the run can be repeated."""
    return int.from_bytes(digest("seed", {"model_id": model_id})[:4])


def _number(content: dict[str, Any], name: str) -> int:
    value = content.get(name)
    if not isinstance(value, int) or value < 0:
        raise RequestError(f"{name} is {value!r}; send a number from 0 up.")
    return value
