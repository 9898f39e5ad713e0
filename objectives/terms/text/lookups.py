"""Lookups in a knowledge base, an SQLite file or an HTTP server, with a cache and a rate limit per server."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import httpx

from objectives.errors import ObjectiveError

MAX_CACHED = 100_000
_MAX_CONNECTIONS = 8

# Names and values of a lookup key, sorted by name.
Key = tuple[tuple[str, str], ...]
# All values of a key in the knowledge base; empty for an unknown key.
Values = tuple[str, ...]


class KnowledgeBase(NamedTuple):
    """Address of a knowledge base and the limits of its requests.

    Attributes:
        source: the path of an SQLite file, or a URL with the names of a key in braces:
            ``https://kb.example/capital?of={country}``. The JSON response is a string, a number or a boolean, or a list
            of these; status 404 means that the key is unknown.
        query: for SQLite, a SELECT whose first column has the values; its parameters are the parts of the key, such as
            ``:country``.
        per_second: maximum number of requests per second to the host of a URL.
        timeout_s: time limit in seconds of one request, or of the wait for a locked database.
    """

    source: str
    query: str
    per_second: float
    timeout_s: float

    @property
    def is_http(self) -> bool:
        return self.source.startswith(("http://", "https://"))


class Lookups:
    """Thread-safe lookups with a cache of values and a rate limit per host.

    Args:
        max_cached: maximum number of cached keys; the oldest entries are evicted.
    """

    def __init__(self, max_cached: int = MAX_CACHED) -> None:
        self._max_cached = max_cached
        self._lock = threading.Lock()
        self._cache: dict[tuple[str, str, Key], Values] = {}
        self._next_slots: dict[str, float] = {}

    def __len__(self) -> int:
        """Return the number of cached keys."""
        return len(self._cache)

    async def look_up(self, base: KnowledgeBase, keys: Sequence[Key]) -> dict[Key, Values]:
        """Return the values of each key; failed lookups are not cached.

        Raises:
            ObjectiveError: a request or query failed.
        """
        with self._lock:
            entries = {key: (base.source, base.query, key) for key in set(keys)}
            cached = {key: self._cache[entry] for key, entry in entries.items() if entry in self._cache}
        missing = sorted(entries.keys() - cached.keys())
        if not missing:
            return cached
        if base.is_http:
            new = await self._request_all(base, missing)
        else:
            new = await asyncio.to_thread(_query_sqlite, base, missing)
        with self._lock:
            self._cache.update({entries[key]: values for key, values in new.items()})
            while len(self._cache) > self._max_cached:
                del self._cache[next(iter(self._cache))]
        return cached | new

    def reserve_slot(self, host: str, per_second: float) -> float:
        """Reserve the next request to a host; return the seconds to wait before sending it."""
        with self._lock:
            now = time.monotonic()
            slot = max(now, self._next_slots.get(host, now))
            self._next_slots[host] = slot + 1 / per_second
            return slot - now

    async def _request_all(self, base: KnowledgeBase, keys: Sequence[Key]) -> dict[Key, Values]:
        limits = httpx.Limits(max_connections=_MAX_CONNECTIONS)
        # No time limit for a free connection, because the rate limit makes requests wait.
        timeout = httpx.Timeout(base.timeout_s, pool=None)
        try:
            async with httpx.AsyncClient(limits=limits, timeout=timeout) as client, asyncio.TaskGroup() as group:
                tasks = {key: group.create_task(self._request(client, base, key)) for key in keys}
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return {key: task.result() for key, task in tasks.items()}

    async def _request(self, client: httpx.AsyncClient, base: KnowledgeBase, key: Key) -> Values:
        try:
            url = fill(base.source, dict(key))
        except (KeyError, ValueError) as error:
            raise ObjectiveError(
                f"the URL {base.source!r} does not fit the pattern ({type(error).__name__}: {error}): write the names "
                f"of the pattern's groups in braces ({', '.join(name for name, _ in key)})"
            ) from error
        await asyncio.sleep(self.reserve_slot(urlsplit(url).netloc, base.per_second))
        try:
            response = await client.get(url)
            if response.status_code == httpx.codes.NOT_FOUND:
                return ()
            response.raise_for_status()
            return _parse_values(response.json())
        except (httpx.HTTPError, ValueError) as error:
            raise ObjectiveError(
                f"the request {url} failed ({type(error).__name__}: {error}): check the address, lower per_second or "
                "raise timeout_s"
            ) from error


# Shared by the process, because the rate limit of a server applies to all terms and runs of the process together.
look_up = Lookups().look_up


def fill(url: str, key: Mapping[str, str]) -> str:
    """Insert the values of a key into a URL, quoted so that a value cannot change the URL's structure.

    >>> fill("https://kb.example/capital?of={country}", {"country": "a/b&c"})
    'https://kb.example/capital?of=a%2Fb%26c'
    """
    return url.format_map({name: quote(value, safe="") for name, value in key.items()})


def _query_sqlite(base: KnowledgeBase, keys: Sequence[Key]) -> dict[Key, Values]:
    uri = f"{Path(base.source).absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=base.timeout_s)) as connection:
            return {
                key: tuple(_to_text(row[0]) for row in connection.execute(base.query, dict(key)) if row[0] is not None)
                for key in keys
            }
    except sqlite3.Error as error:
        raise ObjectiveError(
            f"the query {base.query!r} of the SQLite file {base.source!r} failed ({error}): check the path, and use "
            "the names of the pattern's groups as the parameters of the query"
        ) from error


def _parse_values(response: object) -> Values:
    values = response if isinstance(response, list) else [response]
    if not all(isinstance(value, str | int | float) for value in values):
        raise ValueError(
            f"its response is {str(response)[:80]!r}, but a string, number or boolean is expected, or a list of them"
        )
    return tuple(_to_text(value) for value in values)


def _to_text(value: object) -> str:
    """Return a value as text, a float without an exponent.

    >>> _to_text(1e-05), _to_text(2e16), _to_text(330.0), _to_text(7)
    ('0.00001', '20000000000000000', '330.0', '7')
    """
    return format(Decimal(repr(value)), "f") if isinstance(value, float) and math.isfinite(value) else str(value)
