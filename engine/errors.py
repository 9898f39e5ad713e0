"""Exceptions of the engine. Each message is one sentence for the user.

EngineError                  category "server"
├── LostStateError
├── BusyError
└── RequestError             category "user"
    └── NotFoundError
"""

from __future__ import annotations

from typing import Literal

Category = Literal["user", "server"]


class EngineError(Exception):
    """Failure of one request; `category` tells the client whether the user or the server caused it."""

    category: Category = "server"


class LostStateError(EngineError):
    """Training state that was lost when the engine restarted. Clients continue from the last checkpoint."""


class RequestError(EngineError):
    """Invalid request. The message says what is wrong, the value and the fix."""

    category: Category = "user"


class BusyError(EngineError):
    """Full queue. Clients send the same request again later."""


class NotFoundError(RequestError):
    """Unknown or expired object, such as a session, model, sampler, checkpoint or download link."""
