"""Middleware around all routes: access control, metrics, request log and unexpected errors."""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
from typing import Protocol

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)
requests_log = logging.getLogger("engine.requests")

_LOCAL = re.compile(r"(localhost|[0-9.]+|\[[0-9a-fA-F:.]+\])(:[0-9]+)?")

OPEN_PATHS = ("/api/v1/healthz", "/")
SIGNED_PATHS = "/api/v1/external/"  # signed links below this path need no API key


class AccessControl:
    """Rejects requests from web pages and, if the engine has an API key, requests without it.

    Open paths and signed links need no key. A browser sends an Origin header with every cross-site POST, and the SDK
    never does. Without this check, any web page open on the machine could control an engine without a key. A page whose
    own host name resolves to this machine (DNS rebinding) sends no Origin with a GET request, but its own name as the
    host.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rejection = self._rejection(scope) if scope["type"] == "http" else None
        if rejection is None:
            await self._app(scope, receive, send)
        else:
            await rejection(scope, receive, send)

    def _rejection(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        if "origin" in headers:
            return JSONResponse({"detail": "Requests from web pages are rejected: use the Tinker SDK."}, 403)
        if self._api_key is None and not _is_local(headers.get("host", "")):
            return JSONResponse(
                {"detail": "An engine without an API key accepts only localhost and IP addresses as host: use these."},
                403,
            )
        if self._api_key is None or scope["path"] in OPEN_PATHS or scope["path"].startswith(SIGNED_PATHS):
            return None
        # huggingface_hub sends its token (HF_TOKEN) in the authorization header.
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(key.encode(), self._api_key.encode()):
            return None
        problem = "is not the key of this engine" if key else "is missing"
        return JSONResponse(
            {"detail": f"The API key {problem}: set TINKER_API_KEY to the engine's TINKER_ENGINE_API_KEY."}, 401
        )


class ResponseCounter(Protocol):
    """Metrics with a count of responses."""

    def count_response(self, route: str, status: int) -> None:
        """Count a response by its route and status."""
        ...


class RequestMonitor:
    """Outermost middleware: counts and logs each request, and responds to unexpected exceptions with one sentence."""

    def __init__(self, app: ASGIApp, metrics: ResponseCounter, log_requests: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0

        async def record_status_and_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, record_status_and_send)
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if status == 0:
                # Never respond with a 5xx status: the SDK would retry for minutes, or forever.
                sentence = f"The service failed on this request: {type(error).__name__}: {error}"
                await JSONResponse({"detail": sentence}, 422)(scope, receive, record_status_and_send)
        route = getattr(scope.get("route"), "path", "none").removeprefix("/api/v1")
        self._metrics.count_response(route, status)
        if self._log_requests:
            self._log(scope, route, status, time.perf_counter() - started)

    def _log(self, scope: Scope, route: str, status: int, duration_s: float) -> None:
        line = {
            "time": time.time(),
            "method": scope["method"],
            "path": scope["path"],
            "route": route,
            "status": status,
            "seconds": round(duration_s, 6),
            "client": (scope.get("client") or ("",))[0],
        }
        requests_log.info("%s", json.dumps(line))


def _is_local(host: str) -> bool:
    return host == "" or _LOCAL.fullmatch(host) is not None
