"""Training runs, as the REST client lists them."""

from __future__ import annotations

from fastapi import APIRouter

from engine.checkpoints.runs import TrainingRun
from engine.errors import RequestError
from engine.routes.body import JsonObject, Limit, Offset
from engine.routes.checkpoints import describe_checkpoint
from engine.service.engine import Engine

OWNER = "local"


def runs_router(engine: Engine) -> APIRouter:
    """Return the routes of training runs."""
    router = APIRouter()

    @router.get("/training_runs")
    def training_runs(limit: Limit = 20, offset: Offset = 0, project_id: str | None = None) -> JsonObject:
        if project_id is not None:
            raise RequestError("The local engine has no projects: list the training runs without project_id.")
        runs = engine.runs.all()
        return {
            "training_runs": [_describe(engine, run) for run in runs[offset : offset + limit]],
            "cursor": {"offset": offset, "limit": limit, "total_count": len(runs)},
        }

    @router.get("/training_runs/{run}")
    def training_run(run: str) -> JsonObject:
        return _describe(engine, engine.runs.find(run))

    return router


def _describe(engine: Engine, run: TrainingRun) -> JsonObject:
    checkpoints = engine.checkpoints.list_run(run.model_id)
    # The checkpoints are listed oldest first, so the newest of each kind remains.
    last = {checkpoint.name.kind: describe_checkpoint(checkpoint) for checkpoint in checkpoints}
    session_id = run.model_id.partition(":")[0]
    session = engine.sessions.get(session_id)
    model = session.models.get(run.model_id) if session else None
    times = [run.created_at, *(checkpoint.created_at for checkpoint in checkpoints)]
    return {
        "training_run_id": run.model_id,
        "base_model": run.base_model,
        "model_owner": OWNER,
        "is_lora": True,
        "lora_rank": run.lora.rank,
        "last_request_time": (model.last_request if model else max(times)).isoformat(),
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": dict(run.user_metadata),
    }
