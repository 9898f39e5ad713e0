"""Training runs and checkpoints, as the REST client lists them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from engine.checkpoints.names import parse_path
from engine.checkpoints.runs import TrainingRun
from engine.checkpoints.store import Checkpoint
from engine.routes.body import read_json
from engine.service.engine import Engine

_OWNER = "local"
_TYPES = {"weights": "training", "sampler_weights": "sampler"}


def runs_router(engine: Engine) -> APIRouter:
    router = APIRouter()

    @router.get("/training_runs")
    def training_runs(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        runs = engine.runs.all()
        page = runs[offset : offset + limit]
        return {
            "training_runs": [_describe_run(engine, run) for run in page],
            "cursor": {"offset": offset, "limit": limit, "total_count": len(runs)},
        }

    @router.get("/training_runs/{run}")
    def training_run(run: str) -> dict[str, Any]:
        return _describe_run(engine, engine.runs.find(run))

    @router.get("/training_runs/{run}/checkpoints")
    def checkpoints_of(run: str) -> dict[str, Any]:
        return {"checkpoints": [_describe(checkpoint) for checkpoint in engine.checkpoints.of_run(run)]}

    @router.get("/checkpoints")
    def checkpoints(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        found = [checkpoint for run in engine.runs.all() for checkpoint in engine.checkpoints.of_run(run.run)]
        found.sort(key=lambda checkpoint: checkpoint.created_at, reverse=True)
        return {
            "checkpoints": [_describe(checkpoint) for checkpoint in found[offset : offset + limit]],
            "cursor": {"offset": offset, "limit": limit, "total_count": len(found)},
        }

    @router.delete("/training_runs/{run}/checkpoints/{checkpoint_id:path}")
    def delete(run: str, checkpoint_id: str) -> Response:
        engine.checkpoints.delete(parse_path(f"tinker://{run}/{checkpoint_id}"))
        return Response(status_code=204)

    @router.post("/weights_info")
    async def weights_info(request: Request) -> dict[str, Any]:
        content = await read_json(request, engine.settings.max_body_bytes)
        checkpoint = engine.checkpoints.find(parse_path(str(content.get("tinker_path"))))
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


def _describe_run(engine: Engine, run: TrainingRun) -> dict[str, Any]:
    checkpoints = engine.checkpoints.of_run(run.run)
    last = {checkpoint.name.kind: _describe(checkpoint) for checkpoint in checkpoints}
    session = engine.sessions.get(run.run.partition(":")[0])
    model = session.models.get(run.run) if session else None
    times = [run.created_at, *(checkpoint.created_at for checkpoint in checkpoints)]
    return {
        "training_run_id": run.run,
        "base_model": run.base_model,
        "model_owner": _OWNER,
        "is_lora": True,
        "lora_rank": run.lora.rank,
        "last_request_time": (model.last_request if model else max(times)).isoformat(),
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": dict(run.user_metadata),
    }


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint.name.checkpoint_id,
        "checkpoint_type": _TYPES[checkpoint.name.kind],
        "time": checkpoint.created_at.isoformat(),
        "tinker_path": checkpoint.name.path,
        "size_bytes": checkpoint.num_bytes,
        "public": False,
        "user_metadata": dict(checkpoint.user_metadata),
        "expires_at": checkpoint.expires_at.isoformat() if checkpoint.expires_at else None,
    }
