"""Making custom losses; answered by a request id, like all that a client comes back for."""

from __future__ import annotations

from fastapi import APIRouter, Request
from tinker import types

from engine.routes.body import digest, number, parse, read_json
from engine.service.engine import Engine
from engine.service.futures import Answer

MAX_BODY_BYTES = 4 * 2**20  # a thousand nodes with long arguments


def custom_losses_router(engine: Engine) -> APIRouter:
    router = APIRouter()
    limit = min(MAX_BODY_BYTES, engine.settings.max_body_bytes)

    @router.post("/create_custom_loss")
    async def create_custom_loss(request: Request) -> dict[str, str]:
        content = await read_json(request, limit)
        session = engine.session(str(content.get("session_id")))
        number(content, "custom_loss_seq_id")
        # The content is in the id, so a repeat has the same one, and anything else an answer of its own.
        request_id = f"{session.session_id}:loss:{digest(request.url.path, content).hex()}"

        async def create() -> Answer:
            asked = parse(types.CreateCustomLossRequest, content)
            loss_id = engine.custom_losses.create(content, asked)
            return Answer.json({"loss_id": loss_id, "type": "create_custom_loss"})

        engine.futures.open(request_id)
        await engine.futures.settle(request_id, create())
        return {"request_id": request_id}

    return router
