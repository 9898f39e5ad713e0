"""Reachability check with a short timeout, because the clients of the services retry an absent server for minutes."""

from __future__ import annotations

import httpx

from blocks.errors import UnreachableError, reason


def check_reachable(server: str, url: str, timeout_s: float, remedy: str) -> None:
    """Raise an error unless an HTTP server responds at `url`; any response counts, including an error status.

    Args:
        server: subject of the error message, as in "The MLflow server".
        url: page that is cheap for the server.
        timeout_s: seconds for connecting, and again for responding.
        remedy: how the user can fix the problem; ends the error message.

    Raises:
        UnreachableError: no server responds, or `url` is not an http(s) URL.
    """
    try:
        httpx.get(url, timeout=timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnreachableError(f"{server} does not respond ({reason(error)}): {remedy}.") from error
