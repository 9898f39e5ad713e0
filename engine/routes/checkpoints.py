"""Checkpoints, as the REST client and the `tinker` command line manage them."""

from __future__ import annotations

from fastapi import APIRouter, Request

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.names import CheckpointName, parse_path
from engine.errors import RequestError
from engine.routes.body import JsonObject, Limit, Offset, read_id, read_json
from engine.service.engine import Engine

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
ONE_CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"


def checkpoints_router(engine: Engine) -> APIRouter:
    """Return the routes that list, describe, delete and publish checkpoints and set their TTL."""
    router = APIRouter()
    store = engine.checkpoints

    @router.get("/checkpoints")
    def checkpoints(limit: Limit = 100, offset: Offset = 0) -> JsonObject:
        checkpoints = [checkpoint for run in engine.runs.all() for checkpoint in store.list_run(run.model_id)]
        checkpoints.sort(key=lambda checkpoint: checkpoint.created_at, reverse=True)
        return {
            "checkpoints": [describe_checkpoint(checkpoint) for checkpoint in checkpoints[offset : offset + limit]],
            "cursor": {"offset": offset, "limit": limit, "total_count": len(checkpoints)},
        }

    @router.get("/training_runs/{run}/checkpoints")
    def checkpoints_of_run(run: str) -> JsonObject:
        return {"checkpoints": [describe_checkpoint(checkpoint) for checkpoint in store.list_run(run)]}

    @router.delete(ONE_CHECKPOINT, status_code=204)
    def delete(run: str, kind: str, name: str) -> None:
        store.delete(checkpoint_name(run, kind, name))

    @router.put(f"{ONE_CHECKPOINT}/ttl", status_code=204)
    async def set_ttl(run: str, kind: str, name: str, request: Request) -> None:
        ttl = (await read_json(request, engine.settings.max_body_bytes)).get("ttl_seconds")
        if ttl is not None and type(ttl) is not int:
            raise RequestError(f"ttl_seconds is {ttl!r}; use an integer number of seconds, or null for no expiry.")
        store.set_ttl(checkpoint_name(run, kind, name), ttl)

    @router.post(f"{ONE_CHECKPOINT}/publish", status_code=204)
    def publish(run: str, kind: str, name: str) -> None:
        store.set_public(checkpoint_name(run, kind, name), True)

    @router.delete(f"{ONE_CHECKPOINT}/publish", status_code=204)
    def unpublish(run: str, kind: str, name: str) -> None:
        store.set_public(checkpoint_name(run, kind, name), False)

    @router.post("/weights_info")
    async def weights_info(request: Request) -> JsonObject:
        content = await read_json(request, engine.settings.max_body_bytes)
        checkpoint = store.find(parse_path(read_id(content, "tinker_path")))
        return {
            "base_model": checkpoint.base_model,
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": checkpoint.lora.rank,
            "train_unembed": checkpoint.lora.train_unembed,
            "train_mlp": checkpoint.lora.train_mlp,
            "train_attn": checkpoint.lora.train_attn,
        }

    return router


def describe_checkpoint(checkpoint: Checkpoint) -> JsonObject:
    """Describe a checkpoint in the format of the SDK's `Checkpoint`."""
    return {
        "checkpoint_id": checkpoint.name.checkpoint_id,
        "checkpoint_type": _TYPES[checkpoint.name.kind],
        "time": checkpoint.created_at.isoformat(),
        "tinker_path": checkpoint.name.path,
        "size_bytes": checkpoint.num_bytes,
        "public": checkpoint.public,
        "user_metadata": dict(checkpoint.user_metadata),
        "expires_at": checkpoint.expires_at.isoformat() if checkpoint.expires_at else None,
    }


def checkpoint_name(run: str, kind: str, name: str) -> CheckpointName:
    """Build a checkpoint name from the parts of a route; raises a RequestError if a part is invalid."""
    return parse_path(f"tinker://{run}/{kind}/{name}")
