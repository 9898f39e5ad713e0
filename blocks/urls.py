"""URLs of servers: check that a server responds; refuse or hide user names, passwords and secrets in queries."""

from __future__ import annotations

import re
import ssl
from functools import cache

import httpx

from blocks.errors import ConfigError, UnreachableError, reason

# User name and password. First alternative: all before the last @ that precedes the first / ? or #, because a password
# may contain @. Second: all before the last @ if `name:` is not followed by a port; it may then contain / ? #.
_USER = re.compile(r"(?<=://)(?:[^/?#\s]+|[^/?#\s:@\[]*:(?!\d*[/?#])[^\s\"]{1,1000})(?=@)")
_USER_WITHOUT_SCHEME = re.compile(r"[^/?#\s:@]+:[^/\s]+@[^\s@]+")
_SECRET = (
    r"(?:[\w.-]{0,100}[_.-])?(?:(?:api|access|secret)_?key|passwd|pwd|(?:ssl)?password|secret|sig|signature|token)"
)
# Limits such as {0,4096} keep the search in long texts without URLs fast. Values such as {token} and $TOKEN are
# placeholders.
_QUERY = re.compile(rf"(://[^\s\"]{{0,4096}}?[?&]{_SECRET}=)(?!\*\*\*|[{{$])[^&#\s\"]+", re.IGNORECASE)


def has_credentials(url: str) -> bool:
    """Return whether a URL has a user name, a password or a secret in its query.

    Without a scheme, only `name:password@host` is recognized.

    >>> has_credentials("http://user:secret@host:5000"), has_credentials("user:secret@host")
    (True, True)
    >>> has_credentials("http://host/a@b"), has_credentials("http://host:5000/a@b"), has_credentials("a@b")
    (False, False, False)
    """
    return contains_credentials(url) or ("://" not in url and _USER_WITHOUT_SCHEME.fullmatch(url) is not None)


def contains_credentials(text: str) -> bool:
    """Return whether a text contains a URL with a user name, a password or a secret in its query.

    >>> contains_credentials("see postgresql://host/db?user=me&password=s3cr3t"), contains_credentials("from: me@host")
    (True, False)
    """
    return _USER.search(text) is not None or _QUERY.search(text) is not None


def hide_credentials(text: str) -> str:
    """Replace the user name and password of each URL in a text, and the secrets in its query.

    A text that is a single URL may lack the scheme.

    >>> hide_credentials("see postgresql://me:s3cr@t@host/db, or http://host/a@b")
    'see postgresql://***@host/db, or http://host/a@b'
    >>> hide_credentials("postgresql://host/db?user=me&password=s3cr3t&sslmode=require")
    'postgresql://host/db?user=me&password=***&sslmode=require'
    >>> hide_credentials("me:s3cr3t@host")
    '***@host'
    """
    if "://" not in text and _USER_WITHOUT_SCHEME.fullmatch(text):
        return "***@" + text.rpartition("@")[2]
    text = _USER.sub("***", text)
    while (hidden := _QUERY.sub(r"\1***", text)) != text:  # a match hides one secret of a URL
        text = hidden
    return text


def check_no_credentials(url: str, place: str, fix: str) -> None:
    """Check that a URL has no user name, password or secret.

    Args:
        place: where the URL was set; starts the error message.

    Raises:
        ConfigError: the URL has one of them; the message hides it.
    """
    if has_credentials(url):
        raise ConfigError(
            f"{place} {hide_credentials(url)!r} has a user name, a password or a secret, which would be shown: {fix}."
        )


def check_reachable(server: str, url: str, timeout_s: float, remedy: str) -> None:
    """Raise an error unless an HTTP server responds at `url`; any response counts, including an error status.

    Call it before the client of a service, which would retry an absent server for minutes.

    Args:
        server: subject of the error message, as in "The MLflow server".
        url: page that is cheap for the server.
        timeout_s: seconds for connecting, and again for responding.
        remedy: how the user can fix the problem; ends the error message.

    Raises:
        UnreachableError: no server responds, or `url` is not an http(s) URL.
    """
    try:
        httpx.get(url, timeout=timeout_s, verify=_tls_context())
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnreachableError(f"{server} does not respond ({reason(error)}): {remedy}.") from error


@cache
def _tls_context() -> ssl.SSLContext:
    """TLS settings of httpx. Creating them parses all certificates, which takes 12 ms."""
    return httpx.create_ssl_context()
