"""ASGI application of the front: a request goes to the engine of its session, and lists are merged from all engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime

from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse

from engine.errors import RequestError
from engine.front.forward import EngineClient, EngineUnavailable, Reply
from engine.front.metrics import FrontMetrics
from engine.front.processes import EngineProcess
from engine.front.upload import Upload
from engine.part import owner
from engine.routes.body import JsonObject, Limit, Offset, read_json
from engine.routes.middleware import AccessControl, RequestMonitor
from engine.service.metrics import CONTENT_TYPE
from engine.service.settings import Settings

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_SEARCH_LIMIT = 50  # default of the SDK's SessionSearchRequest
_MAX_SEARCH_LIMIT = 200


class _Rejected(Exception):
    """Response of an engine that rejects a question of the front, such as a search with `project_ids`."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


def make_front(engines: Sequence[EngineProcess], client: EngineClient, settings: Settings) -> FastAPI:
    """Create the ASGI application."""
    app = FastAPI(title="tinker-flows engines", docs_url=None, redoc_url=None, openapi_url=None)
    front = _Front(engines, client, settings.max_body_bytes)
    app.add_middleware(AccessControl, api_key=settings.api_key)  # before the front reads the body
    app.add_middleware(RequestMonitor, metrics=front.own_metrics, log_requests=False)  # the engines log theirs

    @app.exception_handler(EngineUnavailable)
    async def retry_later(_request: Request, error: EngineUnavailable) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 429)

    @app.exception_handler(_Rejected)
    async def pass_on(_request: Request, rejected: _Rejected) -> Response:
        return rejected.reply.response()

    @app.exception_handler(RequestError)
    async def reject(_request: Request, error: RequestError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 422)

    app.add_api_route("/api/v1/sessions", front.sessions)
    app.add_api_route("/api/v1/sessions/search", front.search, methods=["POST"])
    app.add_api_route("/api/v1/training_runs", front.training_runs)
    app.add_api_route("/status", front.status)
    app.add_route("/metrics", front.metrics)
    app.add_route("/api/v1/create_session", front.create_session, methods=["POST"])
    app.add_route("/{path:path}", front.forward, methods=_METHODS)
    return app


class _Front:
    """Handlers of requests to several engines."""

    def __init__(self, engines: Sequence[EngineProcess], client: EngineClient, max_body_bytes: int) -> None:
        self._engines = engines
        self._client = client
        self._max_body_bytes = max_body_bytes
        self._opening = asyncio.Lock()
        self.own_metrics = FrontMetrics()

    async def forward(self, request: Request) -> Response:
        """Forward a request to the engine of its session; a request without a session goes to any engine."""
        upload = Upload(request, self._max_body_bytes)
        session_id = await upload.session_id()
        engine = self._any() if session_id is None else self._owner(session_id)
        return await self._client.forward(request, engine, upload)

    async def create_session(self, request: Request) -> Response:
        """Open a session on the running engine with the fewest open sessions."""
        upload = Upload(request, self._max_body_bytes)
        await upload.session_id()  # reads the body before the lock is taken
        async with self._opening:
            statuses = await self._ask_running(request, "/status")
            counts = {engine: reply.json()["figures"]["sessions"] for engine, reply in statuses.items()}
            engine = min(counts, key=counts.__getitem__)
            return await self._client.forward(request, engine, upload)

    async def sessions(self, request: Request, limit: Limit = 20, offset: Offset = 0) -> JsonObject:
        """List the ids of the sessions of all engines, newest first."""
        session_ids: list[str] = []
        query: JsonObject | None = {"limit": _MAX_SEARCH_LIMIT}
        while query is not None and len(session_ids) < offset + limit:
            page = await self._search(request, query)
            session_ids += [session["session_id"] for session in page["sessions"]]
            query = page["next_cursor"] and {**query, "cursor": page["next_cursor"]}
        return {"sessions": session_ids[offset : offset + limit]}

    async def search(self, request: Request) -> JsonObject:
        """Search the sessions of all engines."""
        return await self._search(request, await read_json(request, self._max_body_bytes))

    async def training_runs(self, request: Request) -> JsonObject:
        """List training runs, each as its own engine describes it: only this engine knows the time of its last request.

        All engines list the same runs, from their common state folder.
        """
        replies = await self._ask_running(request, f"/api/v1/training_runs?{request.url.query}")
        pages = {engine: reply.json() for engine, reply in replies.items()}
        described = {
            run["training_run_id"]: run
            for engine, page in pages.items()
            for run in page["training_runs"]
            if self._owner(run["training_run_id"].partition(":")[0]) is engine
        }
        first = next(iter(pages.values()))
        return {
            **first,
            "training_runs": [described.get(run["training_run_id"], run) for run in first["training_runs"]],
        }

    async def status(self, request: Request) -> JsonObject:
        """Add up the figures of the running engines, and list the models of all of them."""
        statuses = [reply.json() for reply in (await self._ask_running(request, "/status")).values()]
        return {
            "bases": statuses[0]["bases"],
            "figures": {name: sum(status["figures"][name] for status in statuses) for name in statuses[0]["figures"]},
            "models": [model for status in statuses for model in status["models"]],
        }

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of the front and of the running engines."""
        replies = await self._ask_running(request, "/metrics")
        texts = {self._engines.index(engine): reply.body.decode() for engine, reply in replies.items()}
        return Response(self.own_metrics.text(texts), media_type=CONTENT_TYPE)

    def _owner(self, session_id: str) -> EngineProcess:
        return self._engines[owner(session_id, len(self._engines))]

    def _any(self) -> EngineProcess:
        return next((engine for engine in self._engines if engine.is_up.is_set()), self._engines[0])

    async def _search(self, request: Request, query: JsonObject) -> JsonObject:
        """Merge the pages of all engines, several of which may list the same finished session."""
        target = "/api/v1/sessions/search"
        replies = await asyncio.gather(*(self._ask(request, engine, target, query) for engine in self._engines))
        pages = [reply.json() for reply in replies]
        sessions = {session["session_id"]: session for page in pages for session in page["sessions"]}
        newest = sorted(sessions.values(), key=_position, reverse=True)
        limit = int(query.get("limit", _SEARCH_LIMIT))
        has_more = len(newest) > limit or any(page["next_cursor"] for page in pages)
        last = newest[:limit][-1] if has_more else None
        return {
            "sessions": newest[:limit],
            "next_cursor": last and {"last_created_at": last["created_at"], "last_session_id": last["session_id"]},
        }

    async def _ask(self, request: Request, engine: EngineProcess, target: str, content: object = None) -> Reply:
        reply = await self._client.ask(request, engine, target, content)
        if reply.status != 200:
            raise _Rejected(reply)
        return reply

    async def _ask_running(self, request: Request, target: str) -> dict[EngineProcess, Reply]:
        """Send a question to all running engines; return at least one reply."""
        running = [engine for engine in self._engines if engine.is_up.is_set()] or [self._any()]
        questions = (self._ask(request, engine, target) for engine in running)
        replies = await asyncio.gather(*questions, return_exceptions=True)
        received = {engine: reply for engine, reply in zip(running, replies, strict=True) if isinstance(reply, Reply)}
        errors = [reply for reply in replies if isinstance(reply, BaseException)]
        for error in errors:
            if not received or not isinstance(error, EngineUnavailable):
                raise error
        return received


def _position(session: JsonObject) -> tuple[datetime, str]:
    return datetime.fromisoformat(session["created_at"]), session["session_id"]
