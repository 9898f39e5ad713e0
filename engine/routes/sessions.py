"""Sessions: a client's models and samplers live as long as one."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from engine.errors import NotThereError, RequestError
from engine.routes.body import read_json
from engine.routes.checkpoints import Limit, Offset
from engine.service.engine import Engine
from engine.service.sessions import FINISH_REASONS, FinishReason

MAX_METADATA_BYTES = 65_536
MAX_NAME = 256
_REASONS: dict[str, FinishReason] = {reason: reason for reason in FINISH_REASONS}


def sessions_router(engine: Engine) -> APIRouter:
    router = APIRouter()
    limit = engine.settings.max_body_bytes

    @router.post("/create_session")
    async def create_session(request: Request) -> dict[str, str | None]:
        content = await read_json(request, limit)
        session = engine.open_session(_metadata(content.get("user_metadata")), _display_name(content))
        project = content.get("project_id")
        return {
            "session_id": session.session_id,
            "type": "create_session",
            "warning_message": f"The local engine has no projects: {project!r} is not noted." if project else None,
        }

    @router.post("/session_heartbeat")
    async def heartbeat(request: Request) -> Response:
        content = await read_json(request, limit)
        try:
            engine.session(str(content.get("session_id")))
        except NotThereError as error:
            return JSONResponse({"detail": str(error)}, 410)  # ends the client's heartbeats
        return JSONResponse({"type": "session_heartbeat"})

    @router.post("/sessions/{session_id}/finish")
    async def finish(session_id: str, request: Request) -> dict[str, str]:
        content = await read_json(request, limit)
        given, detail = content.get("reason"), content.get("detail")
        kind = given.get("type") if isinstance(given, dict) else None
        reason = _REASONS.get(str(kind), "interrupted")
        engine.close_session(session_id, reason, detail[:MAX_METADATA_BYTES] if isinstance(detail, str) else None)
        return {"status": "finished"}

    @router.get("/sessions")
    async def sessions(limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
        return {"sessions": [summary.session_id for summary in engine.summaries()[offset : offset + limit]]}

    @router.get("/sessions/{session_id}")
    async def session(session_id: str) -> dict[str, Any]:
        summary = engine.summary(session_id)
        return {
            "training_run_ids": summary.run_ids,
            "sampler_ids": summary.sampler_ids,
            "user_metadata": summary.user_metadata,
            "display_name": summary.display_name,
        }

    @router.post("/telemetry")
    async def telemetry() -> dict[str, str]:
        return {"status": "accepted"}

    return router


def _metadata(given: object) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise RequestError(f"user_metadata is {str(given)[:80]!r}; give names and texts.")
    if sum(len(key) + len(value) for key, value in given.items()) > MAX_METADATA_BYTES:
        raise RequestError(f"user_metadata is longer than {MAX_METADATA_BYTES} characters: keep it short.")
    return given


def _display_name(content: dict[str, Any]) -> str | None:
    name = content.get("display_name")
    if name is not None and (not isinstance(name, str) or len(name) > MAX_NAME):
        raise RequestError(f"display_name is {str(name)[:80]!r}; give a text of up to {MAX_NAME} characters.")
    return name
