"""Look-ups in a knowledge base, SQLite or HTTP, with one cache and one pace for the whole process."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import httpx

from objectives.errors import ObjectiveError

MAX_CACHED = 100_000
_MAX_CONNECTIONS = 8

# What is asked, in the order of its names.
Key = tuple[tuple[str, str], ...]
# All values that the knowledge base has for a key; none where it does not know it.
Values = tuple[str, ...]


class KnowledgeBase(NamedTuple):
    """Where to look up and how.

    Attributes:
        source: the path of an SQLite file, or a URL with the names of a key in braces:
            ``https://kb.example/capital?of={country}``. Its answer is a JSON value or a list of them; 404 is "unknown".
        query: for SQLite: a SELECT whose first column has the values, with the names of a key as ``:country``.
        per_second: requests in a second at most, to the host of a URL.
        timeout_s: seconds for one request, or for a locked database.
    """

    source: str
    query: str
    per_second: float
    timeout_s: float

    @property
    def is_http(self) -> bool:
        return self.source.startswith(("http://", "https://"))


async def look_up(base: KnowledgeBase, keys: Sequence[Key]) -> dict[Key, Values]:
    """What a knowledge base says of each key; asked once in the life of the process, and failures asked again.

    Raises:
        ObjectiveError: the knowledge base cannot be reached or asked.
    """
    place = (base.source, base.query)
    with _LOCK:
        known = {key: _cache[place, key] for key in set(keys) if (place, key) in _cache}
    missing = sorted(set(keys) - known.keys())
    if not missing:
        return known
    found = await (_ask_http(base, missing) if base.is_http else asyncio.to_thread(_ask_sqlite, base, missing))
    with _LOCK:
        _cache.update({(place, key): values for key, values in found.items()})
        while len(_cache) > MAX_CACHED:
            del _cache[next(iter(_cache))]
    return known | found


_LOCK = threading.Lock()
_cache: dict[tuple[tuple[str, str], Key], Values] = {}
_next_slots: dict[str, float] = {}


def _ask_sqlite(base: KnowledgeBase, keys: Sequence[Key]) -> dict[Key, Values]:
    uri = f"{Path(base.source).absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=base.timeout_s)) as connection:
            return {
                key: tuple(str(row[0]) for row in connection.execute(base.query, dict(key)) if row[0] is not None)
                for key in keys
            }
    except sqlite3.Error as error:
        raise ObjectiveError(
            f"the query {base.query!r} of the SQLite file {base.source!r} failed ({error}): check the path, and "
            "that the query names its values as the pattern's groups are named"
        ) from error


async def _ask_http(base: KnowledgeBase, keys: Sequence[Key]) -> dict[Key, Values]:
    limits = httpx.Limits(max_connections=_MAX_CONNECTIONS)
    # No limit on the wait for a connection: the pace makes requests wait, and that is no failure.
    timeout = httpx.Timeout(base.timeout_s, pool=None)
    try:
        async with httpx.AsyncClient(limits=limits, timeout=timeout) as client, asyncio.TaskGroup() as group:
            tasks = {key: group.create_task(_request(client, base, key)) for key in keys}
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return {key: task.result() for key, task in tasks.items()}


async def _request(client: httpx.AsyncClient, base: KnowledgeBase, key: Key) -> Values:
    url = fill(base.source, dict(key))
    await asyncio.sleep(_wait_s(urlsplit(url).netloc, base.per_second))
    try:
        answer = await client.get(url)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return ()
        answer.raise_for_status()
        return _read(answer.json())
    except (httpx.HTTPError, ValueError) as error:
        raise ObjectiveError(
            f"the request {url} failed ({type(error).__name__}: {error}): check the address, lower per_second or raise "
            "timeout_s"
        ) from error


def fill(url: str, key: Mapping[str, str]) -> str:
    """A URL with the values of a key in it, as text that cannot lead elsewhere.

    >>> fill("https://kb.example/capital?of={country}", {"country": "a/b&c"})
    'https://kb.example/capital?of=a%2Fb%26c'
    """
    return url.format_map({name: quote(value, safe="") for name, value in key.items()})


def _wait_s(host: str, per_second: float) -> float:
    """How long the next request to a host has to wait, which then has its slot."""
    with _LOCK:
        now = time.monotonic()
        slot = max(now, _next_slots.get(host, now))
        _next_slots[host] = slot + 1 / per_second
        return slot - now


def _read(answer: object) -> Values:
    values = answer if isinstance(answer, list) else [answer]
    if not all(isinstance(value, str | int | float) for value in values):
        raise ValueError(f"its answer is {str(answer)[:80]!r} where a JSON value or a list of values is expected")
    return tuple(str(value) for value in values)
