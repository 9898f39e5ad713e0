"""Around all routes: counts and logs each request, and turns what nobody foresaw into a sentence."""

from __future__ import annotations

import json
import logging
import time

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.service.metrics import Metrics

log = logging.getLogger(__name__)
requests_log = logging.getLogger("engine.requests")


class Observer:
    """The outermost layer."""

    def __init__(self, app: ASGIApp, metrics: Metrics, log_requests: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0

        async def note_and_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_and_send)
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if status == 0:
                # Never a 5xx: the SDK would ask again for minutes, or for ever.
                sentence = f"The engine failed on this request: {type(error).__name__}: {error}"
                await JSONResponse({"detail": sentence}, 422)(scope, receive, note_and_send)
        route = getattr(scope.get("route"), "path", "none").removeprefix("/api/v1")
        self._metrics.response(route, status)
        if self._log_requests:
            self._write(scope, route, status, time.perf_counter() - started)

    def _write(self, scope: Scope, route: str, status: int, took_s: float) -> None:
        line = {
            "time": time.time(),
            "method": scope["method"],
            "path": scope["path"],
            "route": route,
            "status": status,
            "seconds": round(took_s, 6),
            "client": (scope.get("client") or ("",))[0],
        }
        requests_log.info("%s", json.dumps(line))
