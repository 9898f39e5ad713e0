"""Status of the engine: Prometheus metrics, queues, and a page for the browser."""

from __future__ import annotations

import re
from pathlib import Path

from fastapi import APIRouter, Response
from starlette.responses import FileResponse

from engine.errors import NotFoundError
from engine.routes.body import JsonObject
from engine.service.engine import Engine
from engine.service.metrics import CONTENT_TYPE

_SEQ_ID = re.compile(r"[0-9]{1,19}")
PAGE = Path(__file__).with_name("status.html")


def status_router(engine: Engine) -> APIRouter:
    """Return the routes of the status page and metrics."""
    router = APIRouter()

    @router.get("/metrics")
    def metrics() -> Response:
        return Response(engine.metrics.text(), media_type=CONTENT_TYPE)

    @router.get("/runs/{model_id}/queue/stats")
    async def queue_stats(model_id: str) -> JsonObject:
        return {"model_id": model_id, **engine.model(model_id).queue.stats()}

    @router.get("/runs/{model_id}/requests/{request_id}/status")
    async def request_status(model_id: str, request_id: str) -> dict[str, str]:
        seq_id = request_id.removeprefix(f"{model_id}:")
        queue = engine.model(model_id).queue
        status = queue.status(int(seq_id)) if _SEQ_ID.fullmatch(seq_id) else "unknown"
        if status == "unknown":
            raise NotFoundError(
                f"{model_id} has no request {request_id}: use its seq id, or the request id of an accepted request."
            )
        return {"request_id": f"{model_id}:{seq_id}", "status": status}

    @router.get("/status")
    async def status() -> JsonObject:
        engine.close_idle_sessions()  # so that the figures count live sessions only
        return {
            "bases": list(engine.bases),
            "figures": engine.gauges(),
            "models": [
                {"model_id": model_id, "session": session.display_name or session.session_id, **model.queue.stats()}
                for session in engine.sessions.values()
                for model_id, model in session.models.items()
            ],
        }

    @router.get("/")
    async def page() -> Response:
        return FileResponse(PAGE, media_type="text/html")

    return router
