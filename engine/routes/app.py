"""The application: all routes behind the guard, and errors as sentences."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse

from engine.errors import BusyError, EngineError, NotThereError, RequestError
from engine.routes.checkpoints import checkpoints_router
from engine.routes.custom_losses import custom_losses_router
from engine.routes.external import external_router
from engine.routes.guard import Guard
from engine.routes.hub import hub_router
from engine.routes.models import models_router
from engine.routes.not_offered import not_offered_router
from engine.routes.observe import observe_router
from engine.routes.observer import Observer
from engine.routes.runs import runs_router
from engine.routes.sampling import sampling_router
from engine.routes.search import search_router
from engine.routes.service import service_router
from engine.routes.sessions import sessions_router
from engine.routes.training import training_router
from engine.service.engine import Engine

_STATUS = {BusyError: 429, NotThereError: 404, RequestError: 422}


def make_app(engine: Engine) -> FastAPI:
    """The ASGI application of one engine."""
    app = FastAPI(title="tinker-flows engine", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, api_key=engine.settings.api_key)
    app.add_middleware(Observer, metrics=engine.metrics, log_requests=engine.settings.log_requests)

    @app.exception_handler(EngineError)
    async def refuse(_request: Request, error: EngineError) -> JSONResponse:
        # Never a 5xx: the SDK would ask again for minutes, or for ever.
        return JSONResponse({"detail": str(error)}, _STATUS.get(type(error), 422))

    for router in (
        service_router,
        sessions_router,
        models_router,
        training_router,
        custom_losses_router,
        sampling_router,
        runs_router,
        checkpoints_router,
        external_router,
        search_router,
    ):
        app.include_router(router(engine), prefix="/api/v1")
    app.include_router(observe_router(engine))
    app.include_router(hub_router(engine))
    app.include_router(not_offered_router(), prefix="/api/v1")
    return app
