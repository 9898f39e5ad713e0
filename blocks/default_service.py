"""Default service of the clients that third-party code opens during a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, NamedTuple

import tinker


class _Service(NamedTuple):
    url: str
    key: str | None


_SERVICE: ContextVar[_Service | None] = ContextVar("default_service", default=None)


@contextmanager
def default_service(url: str, key: str | None) -> Iterator[None]:
    """Use a service for the clients that this context opens without a URL and without a key.

    The SDK takes both from the environment of the process, which may name another service than the run's. A context
    variable leaves other runs of the same process alone.
    """
    _patch_client()
    token = _SERVICE.set(_Service(url, key))
    try:
        yield
    finally:
        _SERVICE.reset(token)


@cache
def _patch_client() -> None:
    init = tinker.ServiceClient.__init__

    @wraps(init)
    def with_default(self: tinker.ServiceClient, *args: Any, **kwargs: Any) -> None:
        service = _SERVICE.get()
        if service and kwargs.get("base_url") is None and kwargs.get("api_key") is None:
            kwargs |= {"base_url": service.url, "api_key": service.key}
        init(self, *args, **kwargs)

    tinker.ServiceClient.__init__ = with_default
