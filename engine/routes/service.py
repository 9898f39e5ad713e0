"""Health checks, client configuration and results of requests."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from engine.errors import NotFoundError
from engine.routes.body import JsonObject, read_id, read_json
from engine.service.engine import Engine

LONG_POLL_S = 25.0  # the SDK times out after 45 s, and polls again at once after a 408


def service_router(engine: Engine) -> APIRouter:
    """Return the routes for health, capabilities, client configuration and results of requests."""
    router = APIRouter()
    limit = engine.settings.max_body_bytes

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/get_server_capabilities")
    async def capabilities() -> JsonObject:
        return {
            "supported_models": [
                {
                    "model_name": name,
                    "max_context_length": base.loaded.max_context,
                    "trainable": True,
                    "sampleable": True,
                }
                for name, base in engine.bases.items()
            ]
        }

    @router.post("/client/config")
    async def client_config() -> JsonObject:
        return {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": False,
            "sample_join_sampling_session": True,
            "sample_use_retrieve_futures": engine.settings.retrieve_futures,
            "custom_loss_server_side": True,
        }

    @router.post("/client/dynamic_config")
    async def dynamic_config() -> JsonObject:
        return {
            "refresh_interval_sec": 300,
            "sample_cancel_enabled": True,
            "sample_cancel_max_batch_size": 64,
        }

    @router.post("/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        request_id = read_id(await read_json(request, limit), "request_id")
        engine.keep_alive(request_id)
        try:
            response = await engine.futures.fetch(request_id, LONG_POLL_S)
        except NotFoundError as error:
            if engine.can_resample(request_id):
                return JSONResponse({"detail": str(error)}, 410)  # the client samples again
            raise
        if response is None:
            return JSONResponse({"type": "try_again", "queue_state": "active"}, 408)
        return Response(response.body, media_type=response.media_type)

    return router
