"""Sessions of clients: opening, closing, listing and searching."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse
from tinker import types

from engine.errors import NotFoundError, RequestError
from engine.routes.body import MAX_METADATA_LENGTH, JsonObject, Limit, Offset, check_metadata, parse, read_id, read_json
from engine.routes.runs import OWNER
from engine.service.engine import Engine
from engine.service.sessions import FINISH_REASONS, FinishReason, SessionSummary

MAX_NAME = 256
_REASONS: dict[str, FinishReason] = {reason: reason for reason in FINISH_REASONS}


def sessions_router(engine: Engine) -> APIRouter:
    """Return the routes that open, finish, list and search sessions, and receive heartbeats and telemetry."""
    router = APIRouter()
    limit = engine.settings.max_body_bytes

    @router.post("/create_session")
    async def create_session(request: Request) -> dict[str, str | None]:
        content = await read_json(request, limit)
        session = engine.open_session(check_metadata(content.get("user_metadata")), _display_name(content))
        project = content.get("project_id")
        return {
            "session_id": session.session_id,
            "type": "create_session",
            "warning_message": f"The local engine has no projects: {project!r} is ignored." if project else None,
        }

    @router.post("/session_heartbeat")
    async def heartbeat(request: Request) -> Response:
        content = await read_json(request, limit)
        try:
            engine.session(read_id(content, "session_id"))
        except NotFoundError as error:
            return JSONResponse({"detail": str(error)}, 410)  # stops the client's heartbeats
        return JSONResponse({"type": "session_heartbeat"})

    @router.post("/sessions/{session_id}/finish")
    async def finish(session_id: str, request: Request) -> dict[str, str]:
        content = await read_json(request, limit)
        sent_reason, detail = content.get("reason"), content.get("detail")
        kind = sent_reason.get("type") if isinstance(sent_reason, dict) else None
        reason = _REASONS.get(str(kind), "interrupted")
        engine.close_session(session_id, reason, detail[:MAX_METADATA_LENGTH] if isinstance(detail, str) else None)
        return {"status": "finished"}

    @router.get("/sessions")
    async def sessions(limit: Limit = 20, offset: Offset = 0) -> JsonObject:
        return {"sessions": [summary.session_id for summary in engine.summaries()[offset : offset + limit]]}

    @router.get("/sessions/{session_id}")
    async def session(session_id: str) -> JsonObject:
        summary = engine.summary(session_id)
        return {
            "training_run_ids": summary.run_ids,
            "sampler_ids": summary.sampler_ids,
            "user_metadata": summary.user_metadata,
            "display_name": summary.display_name,
        }

    @router.post("/sessions/search")
    async def search(request: Request) -> JsonObject:
        query = parse(types.SessionSearchRequest, await read_json(request, limit), strict=False)
        if query.project_ids is not None:
            raise RequestError("The local engine has no projects: search without project_ids.")
        matches = [summary for summary in engine.summaries() if _matches(summary, query)]
        page = matches[: query.limit]
        last = page[-1] if len(matches) > len(page) else None
        return {
            "sessions": [_describe(engine, summary) for summary in page],
            "next_cursor": last
            and {"last_created_at": last.created_at.isoformat(), "last_session_id": last.session_id},
        }

    @router.post("/telemetry")
    async def telemetry() -> dict[str, str]:
        return {"status": "accepted"}

    return router


def _display_name(content: JsonObject) -> str | None:
    name = content.get("display_name")
    if name is not None and (not isinstance(name, str) or len(name) > MAX_NAME):
        raise RequestError(f"display_name is {str(name)[:80]!r}; send a string of up to {MAX_NAME} characters.")
    return name


def _matches(summary: SessionSummary, query: types.SessionSearchRequest) -> bool:
    position = (summary.created_at, summary.session_id)
    if query.cursor is not None and position >= (query.cursor.last_created_at, query.cursor.last_session_id):
        return False
    return _has_name(summary, query) and _has_metadata(summary, query) and _has_status(summary, query)


def _has_name(summary: SessionSummary, query: types.SessionSearchRequest) -> bool:
    if query.session_id is None and query.display_name is None:
        return True
    name = (summary.display_name or "").lower()
    has_name = query.display_name is not None and all(word in name for word in query.display_name.lower().split())
    return has_name or summary.session_id == query.session_id


def _has_metadata(summary: SessionSummary, query: types.SessionSearchRequest) -> bool:
    return query.user_metadata.items() <= dict(summary.user_metadata).items()


def _has_status(summary: SessionSummary, query: types.SessionSearchRequest) -> bool:
    if query.statuses is None:
        return True
    for status in query.statuses:
        if status.type == "active" and summary.reason is None:
            return True
        if status.type == "client_finished" and summary.reason in (status.reasons or FINISH_REASONS):
            return True
    return False


def _describe(engine: Engine, summary: SessionSummary) -> JsonObject:
    checkpoints = [checkpoint for run in summary.run_ids for checkpoint in engine.checkpoints.list_run(run)]
    status: JsonObject = {"type": "active"}
    if summary.reason is not None:
        status = {"type": "client_finished", "reason": {"type": summary.reason}, "detail": summary.detail}
    return {
        "session_id": summary.session_id,
        "created_at": summary.created_at.isoformat(),
        "owner": OWNER,
        "project_id": OWNER,
        "status": status,
        "checkpoints_count": len(checkpoints),
        "display_name": summary.display_name,
        "user_metadata": dict(summary.user_metadata),
        "checkpoint_storage_bytes": sum(checkpoint.num_bytes for checkpoint in checkpoints),
    }
