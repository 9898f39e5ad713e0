"""A first look at a server, because the clients of the services go on trying an absent one for minutes."""

from __future__ import annotations

import httpx

from blocks.errors import AbsentError, reason


def check_answers(what: str, url: str, timeout_s: float, remedy: str) -> None:
    """Refuse a URL where no HTTP server answers; any answer is good, also a refusal.

    Args:
        what: the service, as the subject of the message: "The MLflow server".
        url: a page that costs the server little.
        timeout_s: seconds it may take to connect, and again to answer.
        remedy: what the user can do.

    Raises:
        AbsentError: nothing answers there, or it is no http(s) URL.
    """
    try:
        httpx.get(url, timeout=timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AbsentError(f"{what} does not answer ({reason(error)}): {remedy}.") from error
