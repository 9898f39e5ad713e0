"""Making and loading models; each answers at once with a request id, like all training requests."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from tinker import types

from engine.compute.lora import LoraSpec
from engine.errors import RequestError
from engine.routes.body import digest, number, parse, read_json
from engine.service.engine import Engine
from engine.service.futures import Answer
from engine.service.ordered import Request
from engine.service.training import TrainingModel


def models_router(engine: Engine) -> APIRouter:
    router = APIRouter()
    limit = engine.settings.max_body_bytes

    @router.post("/create_model")
    async def create_model(request: HttpRequest) -> dict[str, str]:
        content = await read_json(request, limit)
        model = engine.new_model(str(content.get("session_id")), number(content, "model_seq_id"))
        submitted = Request(0, "create_model", digest(request.url.path, content), True, lambda: _create(model, content))
        request_id = model.queue.submit(submitted)
        return {"request_id": request_id, "model_id": model.model_id}

    @router.post("/load_weights")
    async def load_weights(request: HttpRequest) -> dict[str, str]:
        content = await read_json(request, limit)
        if content.get("session_id") is None:
            model = engine.model(str(content.get("model_id")))
            seq_id, work = number(content, "seq_id"), _load
        else:
            model = engine.new_model(str(content["session_id"]), number(content, "model_seq_id"))
            seq_id, work = 0, _create_from
        noted = digest(request.url.path, content)
        request_id = model.queue.submit(Request(seq_id, "load_weights", noted, True, lambda: work(model, content)))
        return {"request_id": request_id, "model_id": model.model_id}

    @router.post("/get_info")
    async def get_info(request: HttpRequest) -> dict[str, Any]:
        model = engine.model(str((await read_json(request, limit)).get("model_id")))
        loaded = engine.base(model.origin.base_model).loaded
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_data": {
                "arch": loaded.model.config.model_type,
                "model_name": model.origin.base_model,
                "tokenizer_id": engine.tokenizer_name(loaded),
            },
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": model.origin.lora.rank,
        }

    return router


async def _create(model: TrainingModel, content: dict[str, Any]) -> Answer:
    asked = parse(types.CreateModelRequest, content)
    _check_optimizer(asked.optimizer_config)
    if asked.lora_config is None:
        raise RequestError("create_model came without lora_config, but this engine trains LoRA adapters only.")
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


def _check_optimizer(config: types.OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise RequestError(f"The optimizer {config.type!r} is not offered by this engine: use adamw.")


def _seed_of(model_id: str) -> int:
    """A seed for a client that gave none; it is saved with the model, so the run can be repeated."""
    return int.from_bytes(digest("seed", {"model_id": model_id})[:4])
