"""Routes that create, load and describe models; the first two answer at once with a request id, as in training."""

from __future__ import annotations

from fastapi import APIRouter, Request
from tinker import types

from engine.compute.lora import LoraSpec
from engine.errors import RequestError
from engine.routes.body import JsonObject, check_metadata, digest, parse, read_id, read_json, read_seq_id
from engine.service.engine import Engine
from engine.service.futures import WireResponse
from engine.service.ordered_queue import QueuedRequest
from engine.service.training import TrainingModel


def models_router(engine: Engine) -> APIRouter:
    """Return the routes of models: create, load and describe them."""
    router = APIRouter()
    limit = engine.settings.max_body_bytes

    @router.post("/create_model")
    async def create_model(request: Request) -> dict[str, str]:
        content = await read_json(request, limit)
        model = engine.new_model(read_id(content, "session_id"), read_seq_id(content, "model_seq_id"))
        request_digest = digest(request.url.path, content)
        queued = QueuedRequest(0, "create_model", request_digest, True, lambda: _create(model, content))
        return {"request_id": model.queue.submit(queued), "model_id": model.model_id}

    @router.post("/load_weights")
    async def load_weights(request: Request) -> dict[str, str]:
        content = await read_json(request, limit)
        if content.get("session_id") is None:
            model = engine.model(read_id(content, "model_id"))
            seq_id, work = read_seq_id(content, "seq_id"), _load
        else:
            model = engine.new_model(read_id(content, "session_id"), read_seq_id(content, "model_seq_id"))
            seq_id, work = 0, _create_from_checkpoint
        request_digest = digest(request.url.path, content)
        queued = QueuedRequest(seq_id, "load_weights", request_digest, True, lambda: work(model, content))
        return {"request_id": model.queue.submit(queued), "model_id": model.model_id}

    @router.post("/get_info")
    async def get_info(request: Request) -> JsonObject:
        model = engine.model(read_id(await read_json(request, limit), "model_id"))
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


async def _create(model: TrainingModel, content: JsonObject) -> WireResponse:
    request = parse(types.CreateModelRequest, content)
    _check_optimizer(request.optimizer_config)
    if request.lora_config is None:
        raise RequestError("create_model has no lora_config: send one, because this engine trains LoRA adapters only.")
    lora = request.lora_config
    spec = LoraSpec(
        rank=lora.rank,
        seed=lora.seed if lora.seed is not None else _default_seed(model.model_id),
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )
    return await model.create(request.base_model, spec, check_metadata(request.user_metadata))


async def _create_from_checkpoint(model: TrainingModel, content: JsonObject) -> WireResponse:
    request = parse(types.LoadWeightsRequest, content)
    _check_optimizer(request.optimizer_config)
    return await model.create_from(
        request.path, request.optimizer, request.base_model, check_metadata(request.user_metadata)
    )


async def _load(model: TrainingModel, content: JsonObject) -> WireResponse:
    request = parse(types.LoadWeightsRequest, content)
    return await model.load(request.path, request.optimizer)


def _check_optimizer(config: types.OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise RequestError(f"This engine does not support the optimizer {config.type!r}: use adamw.")


def _default_seed(model_id: str) -> int:
    """Derive a seed for a client that sent none. It is saved with the model, so the run can be repeated."""
    return int.from_bytes(digest("seed", {"model_id": model_id})[:4])
