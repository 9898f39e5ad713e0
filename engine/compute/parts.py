"""Work that can be laid down for a while: a generator that yields where others may have their turn."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Parts = Generator[None, None, Result]


def whole(parts: Parts[Result]) -> Result:
    """What ``parts`` returns, without a break."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value
