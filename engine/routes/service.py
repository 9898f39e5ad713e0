"""Health, configuration and results."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from engine.errors import NotThereError
from engine.routes.body import read_json
from engine.service.engine import Engine

LONG_POLL_S = 25.0  # the SDK gives up at 45 s and asks again at once after a 408


def service_router(engine: Engine) -> APIRouter:
    router = APIRouter()
    limit = engine.settings.max_body_bytes

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
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
    async def client_config() -> dict[str, Any]:
        return {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": False,
            "sample_join_sampling_session": True,
            "sample_use_retrieve_futures": engine.settings.retrieve_futures,
            "custom_loss_server_side": True,
        }

    @router.post("/client/dynamic_config")
    async def dynamic_config() -> dict[str, Any]:
        return {
            "refresh_interval_sec": 300,
            "sample_cancel_enabled": True,
            "sample_cancel_max_batch_size": 64,
        }

    @router.post("/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        request_id = str((await read_json(request, limit)).get("request_id"))
        try:
            answer = await engine.futures.fetch(request_id, LONG_POLL_S)
        except NotThereError as error:
            if engine.lost_sample(request_id):
                return JSONResponse({"detail": str(error)}, 410)  # the client samples again
            raise
        if answer is None:
            return JSONResponse({"type": "try_again", "queue_state": "active"}, 408)
        return Response(answer.body, media_type=answer.media_type)

    return router
