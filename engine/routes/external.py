"""Downloads of external weights, by links that need no key."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse

from engine.errors import NotThereError, RequestError
from engine.routes.checkpoints import ONE_CHECKPOINT, checkpoint_name
from engine.routes.guard import SIGNED_PATHS
from engine.service.engine import Engine


def external_router(engine: Engine) -> APIRouter:
    router = APIRouter()
    store = engine.checkpoints

    @router.get(f"{ONE_CHECKPOINT}/external_weights_urls")
    def external_weights_urls(run: str, kind: str, name: str, request: Request) -> dict[str, Any]:
        checkpoint = store.find(checkpoint_name(run, kind, name))
        if checkpoint.name.kind != "external_weights":
            raise RequestError(
                f"{checkpoint.name.path} is not in a format for elsewhere: save one with save_weights_external."
            )
        links = {file: engine.links.sign(f"{SIGNED_PATHS}{run}/{name}/{file}") for file in checkpoint.files}
        host = str(request.base_url).rstrip("/")
        expires = min(expiry for _, expiry in links.values())
        return {
            "urls": {file: f"{host}{link}" for file, (link, _) in links.items()},
            "expires": datetime.fromtimestamp(expires, UTC).isoformat(),
        }

    @router.get("/external/{run}/{name}/{file}")
    def download(run: str, name: str, file: str, expires: int = 0, signature: str = "") -> Response:
        if not engine.links.is_good(f"{SIGNED_PATHS}{run}/{name}/{file}", expires, signature):
            raise NotThereError("The link has expired or was changed: ask for the external weights' URLs again.")
        checkpoint = store.find(checkpoint_name(run, "external_weights", name))
        if file not in checkpoint.files:
            raise NotThereError(f"{checkpoint.name.path} has no file {file!r}; it has {', '.join(checkpoint.files)}.")
        return FileResponse(store.file_path(checkpoint, file), media_type="application/octet-stream")

    return router
