"""Servers that the environment names: only these receive its keys and logins in the run of a deployment."""

from __future__ import annotations

import os
import re

from blocks.errors import ConfigError

# Strict, because libraries read odd URLs such as http://a\@b differently.
_SERVER = re.compile(r"(https?)://([\w.-]+|\[[\da-f:.]+\])(?::(\d+))?(?:/.*)?", re.ASCII | re.IGNORECASE)
_LOCAL_STORES = ("", "file", "sqlite")


def check_own_service(url: str) -> None:
    """Check that a URL is on the server of TINKER_BASE_URL or, if that is unset, of the hosted service.

    Raises:
        ConfigError: the URL is on another server, which would receive the key of the environment.
    """
    from blocks.tinker_internals import resolve_base_url

    if not _is_same_server(url, resolve_base_url(None)):
        raise ConfigError(
            f"A run of a deployment may not send the worker's API key to {url!r}: set TINKER_BASE_URL of the worker to "
            "this service, or name a block that has the URL and a key, as block:NAME."
        )


def check_own_tracking(uri: str) -> None:
    """Check that a tracking URI is a local file, or on the server of MLFLOW_TRACKING_URI.

    Raises:
        ConfigError: the URI is on another server, which would receive the login of the environment.
    """
    own = os.environ.get("MLFLOW_TRACKING_URI", "")
    dialect = uri.partition(":")[0].partition("+")[0].lower() if ":" in uri else ""
    if dialect not in _LOCAL_STORES and uri != own and not _is_same_server(uri, own):
        raise ConfigError(
            f"A run of a deployment may not send the worker's login to {uri!r}: set MLFLOW_TRACKING_URI of the worker "
            "to this server, or name a block that has the tracking URI, as block:NAME."
        )


def _is_same_server(url: str, other: str) -> bool:
    """Return whether two URLs have the same scheme, host and port.

    >>> _is_same_server("http://localhost:8000/a", "HTTP://127.0.0.1:8000"), _is_same_server("http://a", "http://a:81")
    (True, False)
    >>> _is_same_server("http://b@a", "http://a")
    False
    """
    server = _server(url)
    return server is not None and server == _server(other)


def _server(url: str) -> tuple[str, str, int] | None:
    match = _SERVER.fullmatch(url)
    if match is None:
        return None
    scheme, host, port = match[1].lower(), match[2].lower(), match[3]
    return (
        scheme,
        "127.0.0.1" if host in ("localhost", "[::1]") else host,
        int(port or {"http": 80, "https": 443}[scheme]),
    )
