"""What every request passes first: who asks, from where, and how much."""

from __future__ import annotations

import hmac
import re

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_LOCAL = re.compile(r"(localhost|[0-9.]+|\[[0-9a-fA-F:.]+\])(:[0-9]+)?")

OPEN_PATHS = ("/api/v1/healthz", "/healthz", "/")
SIGNED_PATHS = "/api/v1/external/"  # under it, a signature stands for the key


class Guard:
    """Refuses requests without the API key, and those that a web page made.

    A browser sends an Origin header with every cross-site POST and the SDK never does: without this, any page
    open on the machine could drive an engine on loopback that asks for no key. A page whose own name was made to
    lead here (DNS rebinding) sends no Origin with a GET, but that name as the host.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        if "origin" in headers:
            return JSONResponse({"detail": "Requests from web pages are refused: use the Tinker SDK."}, 403)
        if self._api_key is None and not _is_local(headers.get("host", "")):
            return JSONResponse({"detail": "An engine without a key answers to localhost and IP addresses only."}, 403)
        if self._api_key is None or scope["path"] in OPEN_PATHS or scope["path"].startswith(SIGNED_PATHS):
            return None
        # huggingface_hub sends its token (HF_TOKEN) in this form.
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(key.encode(), self._api_key.encode()):
            return None
        sent = "is not the key of this engine" if key else "is missing"
        return JSONResponse(
            {"detail": f"The API key {sent}: set TINKER_API_KEY to what the engine has in TINKER_ENGINE_API_KEY."},
            401,
        )


def _is_local(host: str) -> bool:
    return host == "" or _LOCAL.fullmatch(host) is not None
