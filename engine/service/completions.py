"""Which samples of one client are finished, for clients that wait for all of theirs with one request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from engine.service.futures import PROTOBUF, Answer


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request; `num_bytes` of its result, None where it failed."""

    request_id: str
    num_bytes: int | None


class Completions:
    """The finished requests in the order they finished, numbered from 1."""

    def __init__(self) -> None:
        self._kept: list[Completion] = []
        self._seen = 0
        self._changed = asyncio.Event()

    def add(self, request_id: str, answer: Answer) -> None:
        self._kept.append(Completion(request_id, len(answer.body) if answer.media_type == PROTOBUF else None))
        self._changed.set()

    async def after(self, cursor: int, timeout_s: float) -> tuple[Sequence[Completion], int]:
        """Those numbered above ``cursor`` and the number of the last; waits for one if there is none.

        What a client has seen, as it says by its cursor, is forgotten.
        """
        seen = min(max(cursor - self._seen, 0), len(self._kept))
        self._kept = self._kept[seen:]
        self._seen += seen
        if not self._kept and timeout_s > 0:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        return tuple(self._kept), self._seen + len(self._kept)
