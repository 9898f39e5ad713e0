"""Downloads of weights that `save_weights_external` wrote in the format of PEFT, by signed links without an API key."""

from __future__ import annotations

import hmac
import secrets
import time
from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse

from engine.errors import NotFoundError, RequestError
from engine.routes.body import JsonObject
from engine.routes.checkpoints import ONE_CHECKPOINT, checkpoint_name
from engine.routes.middleware import SIGNED_PATHS
from engine.service.engine import Engine

LINK_LIFETIME_S = 3600


class SignedLinks:
    """Signs paths with a secret of this process, so that a restart invalidates all links."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign(self, path: str) -> tuple[str, int]:
        """Return ``path`` with expiry and signature in its query, and the expiry in Unix seconds."""
        expires = int(time.time()) + LINK_LIFETIME_S
        return f"{path}?expires={expires}&signature={self._signature(path, expires)}", expires

    def is_valid(self, path: str, expires: int, signature: str) -> bool:
        """Return True for an unexpired signature of this process."""
        expected = self._signature(path, expires)
        return hmac.compare_digest(expected.encode(), signature.encode()) and time.time() < expires

    def _signature(self, path: str, expires: int) -> str:
        return hmac.digest(self._secret, f"{path}?{expires}".encode(), "sha256").hex()


def external_router(engine: Engine) -> APIRouter:
    """Return the routes that create download links of external weights and serve the files."""
    router = APIRouter()
    store = engine.checkpoints
    signed_links = SignedLinks()

    @router.get(f"{ONE_CHECKPOINT}/external_weights_urls")
    def external_weights_urls(run: str, kind: str, name: str, request: Request) -> JsonObject:
        checkpoint = store.find(checkpoint_name(run, kind, name))
        if checkpoint.name.kind != "external_weights":
            raise RequestError(
                f"{checkpoint.name.path} is not in an external format: save it with save_weights_external."
            )
        links = {file: signed_links.sign(f"{SIGNED_PATHS}{run}/{name}/{file}") for file in checkpoint.files}
        host = str(request.base_url).rstrip("/")
        expires = min(expiry for _, expiry in links.values())
        return {
            "urls": {file: f"{host}{link}" for file, (link, _) in links.items()},
            "expires": datetime.fromtimestamp(expires, UTC).isoformat(),
        }

    @router.get("/external/{run}/{name}/{file}")
    def download(run: str, name: str, file: str, expires: int = 0, signature: str = "") -> Response:
        if not signed_links.is_valid(f"{SIGNED_PATHS}{run}/{name}/{file}", expires, signature):
            raise NotFoundError(
                "The link has expired, was changed, or is older than the last start of the engine: request it again."
            )
        checkpoint = store.find(checkpoint_name(run, "external_weights", name))
        if file not in checkpoint.files:
            raise NotFoundError(f"{checkpoint.name.path} has no file {file!r}; it has {', '.join(checkpoint.files)}.")
        return FileResponse(store.file_path(checkpoint, file), media_type="application/octet-stream")

    return router
