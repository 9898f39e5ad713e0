"""Share of one engine process in a service of several engines. Imports no torch, because the front uses it too."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

ERROR_PREFIX = "engine: "  # of the line that an engine prints if it cannot start


@dataclass(frozen=True, slots=True)
class Part:
    """Place of an engine among the engines of one service.

    Attributes:
        index: number of this engine, from 0.
        count: number of engines; 1 for an engine without a front.
        on_device: number of engines on the device of this engine, with which it shares memory and processors.
    """

    index: int = 0
    count: int = 1
    on_device: int = 1

    def owns(self, session_id: str) -> bool:
        """Return True if the session belongs to this engine."""
        return owner(session_id, self.count) == self.index


ALONE = Part()


def part_of(index: int, devices: Sequence[str]) -> Part:
    """Return the part of the engine on ``devices[index]``.

    >>> part_of(1, ["cuda", "cuda:0", "cuda:1"])
    Part(index=1, count=3, on_device=2)
    """
    names = ["cuda:0" if device == "cuda" else device for device in devices]
    return Part(index, len(names), names.count(names[index]))


def owner(session_id: str, count: int) -> int:
    """Return the number of the engine that owns a session.

    The owner follows from the id alone: the front needs no table, and after a restart with the same number of engines
    each of them restores its own sessions. An engine draws the ids of its sessions so that it owns them.

    >>> [owner(session, 2) for session in ("a", "d")]
    [1, 0]
    """
    return zlib.crc32(session_id.encode(errors="replace")) % count
