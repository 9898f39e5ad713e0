"""URLs of servers: a check that one responds, and user names and passwords, which are refused or hidden."""

from __future__ import annotations

import re

import httpx

from blocks.errors import ConfigError, UnreachableError, reason

# Up to the last @ of the part that names the server, because passwords may contain one.
_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]+(?=@)")


def has_credentials(url: str) -> bool:
    """Return whether a URL has a user name or password.

    >>> has_credentials("http://user:secret@host:5000"), has_credentials("http://host/a@b")
    (True, False)
    """
    return _CREDENTIALS.search(url) is not None


def hide_credentials(text: str) -> str:
    """Replace the user name and password of each URL in a text.

    >>> hide_credentials("see postgresql://me:s3cr@t@host/db, or http://host/a@b")
    'see postgresql://***@host/db, or http://host/a@b'
    """
    return _CREDENTIALS.sub("***", text)


def check_no_credentials(url: str, place: str, fix: str) -> None:
    """Check that a URL has no user name and no password.

    Args:
        place: where the URL was set; starts the error message.

    Raises:
        ConfigError: it has one; the message does not show it.
    """
    if has_credentials(url):
        raise ConfigError(
            f"{place} {hide_credentials(url)!r} has a user name or password, which would be shown: {fix}."
        )


def check_reachable(server: str, url: str, timeout_s: float, remedy: str) -> None:
    """Raise an error unless an HTTP server responds at `url`; any response counts, including an error status.

    The timeout is short, because the clients of the services retry an absent server for minutes.

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
