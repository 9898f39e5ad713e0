"""Sessions: a client's models and samplers live as long as one."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from engine.errors import NotThereError
from engine.routes.body import read_json
from engine.service.engine import Engine


def sessions_router(engine: Engine) -> APIRouter:
    router = APIRouter()
    limit = engine.settings.max_body_bytes

    @router.post("/create_session")
    async def create_session(request: Request) -> dict[str, str]:
        content = await read_json(request, limit)
        session = engine.open_session(content.get("user_metadata") or {}, content.get("display_name"))
        return {"session_id": session.session_id, "type": "create_session"}

    @router.post("/session_heartbeat")
    async def heartbeat(request: Request) -> Response:
        content = await read_json(request, limit)
        try:
            engine.session(str(content.get("session_id")))
        except NotThereError as error:
            return JSONResponse({"detail": str(error)}, 410)  # ends the client's heartbeats
        return JSONResponse({"type": "session_heartbeat"})

    @router.post("/sessions/{session_id}/finish")
    async def finish(session_id: str) -> dict[str, str]:
        engine.close_session(session_id)
        return {"status": "finished"}

    @router.post("/telemetry")
    async def telemetry() -> dict[str, str]:
        return {"status": "accepted"}

    return router
