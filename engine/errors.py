"""The engine's own exceptions: every message is one sentence for the user."""

from __future__ import annotations

from typing import Literal

Category = Literal["user", "server"]


class EngineError(Exception):
    """A request that cannot be served; `category` tells the client whose matter it is."""

    category: Category = "server"


class LostError(EngineError):
    """What the engine lost when it was restarted: a client can go on from the last checkpoint."""


class RequestError(EngineError):
    """The request is at fault: what was got, what was expected, what to do."""

    category: Category = "user"


class BusyError(EngineError):
    """More requests wait than the engine keeps: the same request is welcome a little later."""


class NotThereError(RequestError):
    """The request names a model, session, sampler or checkpoint that this engine does not have."""
