"""What only the hosted service has: answered at once, by a sentence, with a status that the SDK does not retry."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter

from engine.errors import RequestError

_BILLING = "billing: it trains on your own machine"
_PROJECTS = "projects: everything in its state folder has one owner"
_KEYS = "accounts: the key is the one it was started with"

NOT_OFFERED = (
    ("GET", "/audit", "an audit log: see its own log, and /metrics"),
    ("GET", "/billing/usage/events", _BILLING),
    ("GET", "/billing/usage/checkpoints/current", f"{_BILLING}; checkpoint sizes are in `tinker checkpoint list`"),
    ("PUT", "/sessions/{session_id}/project", _PROJECTS),
    ("GET", "/sessions/{session_id}/trace_export", "traces: see its own log, and /metrics"),
    ("POST", "/copy_weights", f"{_PROJECTS}; load the checkpoint itself by its path"),
    ("POST", "/auth/token", _KEYS),
    ("GET", "/auth/apikey/me", _KEYS),
    ("DELETE", "/auth/apikey/me", _KEYS),
)


def not_offered_router() -> APIRouter:
    router = APIRouter()
    for method, path, what in NOT_OFFERED:
        router.add_api_route(path, _refusal(what), methods=[method])
    return router


def _refusal(what: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise RequestError(f"The local engine does not offer {what}.")

    return refuse
