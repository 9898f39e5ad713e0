"""User names and passwords in URLs: refused where they would be recorded, and hidden where a URL is shown."""

from __future__ import annotations

import re

from blocks.errors import ConfigError

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
