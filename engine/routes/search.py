"""Search among sessions, as `RestClient.search_sessions` asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from tinker import types

from engine.errors import RequestError
from engine.routes.body import parse, read_json
from engine.routes.runs import OWNER
from engine.service.engine import Engine
from engine.service.sessions import SessionSummary


def search_router(engine: Engine) -> APIRouter:
    router = APIRouter()

    @router.post("/sessions/search")
    async def search(request: Request) -> dict[str, Any]:
        asked = parse(types.SessionSearchRequest, await read_json(request, engine.settings.max_body_bytes))
        if asked.project_ids is not None:
            raise RequestError("The local engine has no projects: search without project_ids.")
        found = list(_matching(engine.summaries(), asked))
        page = found[: asked.limit]
        last = page[-1] if len(found) > len(page) else None
        return {
            "sessions": [_describe(engine, summary) for summary in page],
            "next_cursor": last
            and {"last_created_at": last.created_at.isoformat(), "last_session_id": last.session_id},
        }

    return router


def _matching(summaries: list[SessionSummary], asked: types.SessionSearchRequest) -> Iterator[SessionSummary]:
    for summary in summaries:
        place = (summary.created_at, summary.session_id)
        if asked.cursor is not None and place >= (asked.cursor.last_created_at, asked.cursor.last_session_id):
            continue
        if _is_named(summary, asked) and _has_metadata(summary, asked) and _has_status(summary, asked):
            yield summary


def _is_named(summary: SessionSummary, asked: types.SessionSearchRequest) -> bool:
    if asked.session_id is None and asked.display_name is None:
        return True
    name = (summary.display_name or "").lower()
    named = asked.display_name is not None and all(word in name for word in asked.display_name.lower().split())
    return named or summary.session_id == asked.session_id


def _has_metadata(summary: SessionSummary, asked: types.SessionSearchRequest) -> bool:
    return asked.user_metadata.items() <= dict(summary.user_metadata).items()


def _has_status(summary: SessionSummary, asked: types.SessionSearchRequest) -> bool:
    if asked.statuses is None:
        return True
    for status in asked.statuses:
        if status.type == "active" and summary.reason is None:
            return True
        if status.type == "client_finished" and summary.reason in (status.reasons or (summary.reason,)):
            return summary.reason is not None
    return False


def _describe(engine: Engine, summary: SessionSummary) -> dict[str, Any]:
    checkpoints = [checkpoint for run in summary.run_ids for checkpoint in engine.checkpoints.of_run(run)]
    status: dict[str, Any] = {"type": "active"}
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
