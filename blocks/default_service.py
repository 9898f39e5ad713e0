"""Default service of the clients that third-party code opens during a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, NamedTuple

import tinker

from blocks.own_servers import check_own_service
from objectives.config.import_policy import is_restricted


class _Service(NamedTuple):
    url: str
    key: str | None


_SERVICE: ContextVar[_Service | None] = ContextVar("default_service", default=None)


@contextmanager
def default_service(url: str, key: str | None) -> Iterator[None]:
    """Use a service for the clients that this context opens without a URL and without a key.

    The SDK takes both from the environment of the process, which may name another service than the run's. A context
    variable leaves other runs of the same process alone. In the run of a deployment, the URL of a client can come from
    the config, so a client without a key may use only the server of the session or of the environment.
    """
    _patch_client()
    token = _SERVICE.set(_Service(url, key))
    try:
        yield
    finally:
        _SERVICE.reset(token)


@cache
def _patch_client() -> None:
    """Replace the constructor of the SDK's client, once per process, by one that applies `default_service`."""
    init = tinker.ServiceClient.__init__

    @wraps(init)
    def with_default(self: tinker.ServiceClient, *args: Any, **kwargs: Any) -> None:
        service, url = _SERVICE.get(), kwargs.get("base_url")
        if kwargs.get("api_key") is None:
            if service and url is None:
                kwargs |= {"base_url": service.url, "api_key": service.key}
            elif url and not (service and url == service.url) and is_restricted():
                check_own_service(str(url))
        init(self, *args, **kwargs)

    tinker.ServiceClient.__init__ = with_default
