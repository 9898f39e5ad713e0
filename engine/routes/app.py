"""ASGI application: all routes, middleware, and errors as JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import JSONResponse

from engine.errors import BusyError, EngineError, NotFoundError, RequestError
from engine.routes.checkpoints import checkpoints_router
from engine.routes.external import external_router
from engine.routes.hub import hub_router
from engine.routes.middleware import AccessControl, RequestMonitor
from engine.routes.models import models_router
from engine.routes.runs import runs_router
from engine.routes.sampling import sampling_router
from engine.routes.service import service_router
from engine.routes.sessions import sessions_router
from engine.routes.status import status_router
from engine.routes.training import training_router
from engine.service.engine import Engine

_STATUS = {BusyError: 429, NotFoundError: 404, RequestError: 422}

_NO_BILLING = "billing: it trains on your own machine"
_NO_PROJECTS = "projects: everything in its state folder has one owner"
_NO_ACCOUNTS = "accounts: its only API key is the TINKER_ENGINE_API_KEY that it was started with, if any"

# Features that only the hosted service has.
UNSUPPORTED = (
    ("GET", "/audit", "an audit log: see its own log, and /metrics"),
    ("GET", "/billing/usage/events", _NO_BILLING),
    ("GET", "/billing/usage/checkpoints/current", f"{_NO_BILLING}; `tinker checkpoint list` shows checkpoint sizes"),
    ("PUT", "/sessions/{session_id}/project", _NO_PROJECTS),
    ("GET", "/sessions/{session_id}/trace_export", "traces: see its own log, and /metrics"),
    ("POST", "/copy_weights", f"{_NO_PROJECTS}; load the checkpoint itself by its path"),
    ("POST", "/auth/token", _NO_ACCOUNTS),
    ("GET", "/auth/apikey/me", _NO_ACCOUNTS),
    ("DELETE", "/auth/apikey/me", _NO_ACCOUNTS),
)


def make_app(engine: Engine) -> FastAPI:
    """Create the ASGI application of one engine."""
    app = FastAPI(title="tinker-flows engine", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(AccessControl, api_key=engine.settings.api_key)
    app.add_middleware(RequestMonitor, metrics=engine.metrics, log_requests=engine.settings.log_requests)

    @app.exception_handler(EngineError)
    async def reject(_request: Request, error: EngineError) -> JSONResponse:
        # Never respond with a 5xx status: the SDK would retry for minutes, or forever.
        return JSONResponse({"detail": str(error)}, _STATUS.get(type(error), 422))

    for router in (
        service_router,
        sessions_router,
        models_router,
        training_router,
        sampling_router,
        runs_router,
        checkpoints_router,
        external_router,
    ):
        app.include_router(router(engine), prefix="/api/v1")
    app.include_router(status_router(engine))
    app.include_router(hub_router(engine))
    app.include_router(unsupported_router(), prefix="/api/v1")
    return app


def unsupported_router() -> APIRouter:
    """Routes that respond to every request with one sentence and a status that the SDK does not retry."""
    router = APIRouter()
    for method, path, feature in UNSUPPORTED:
        router.add_api_route(path, _rejection(feature), methods=[method])
    return router


def _rejection(feature: str) -> Callable[[], Awaitable[None]]:
    async def reject() -> None:
        raise RequestError(f"The local engine does not offer {feature}.")

    return reject
