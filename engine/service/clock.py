"""When work may start: at once, or on the ticks of a clock, as the hosted service does."""

from __future__ import annotations

import asyncio
import time


class Clock:
    """Ticks every ``cycle_s`` seconds; with 0 it is always time."""

    def __init__(self, cycle_s: float) -> None:
        self._cycle_s = cycle_s

    async def tick(self) -> None:
        """Wait for the next tick."""
        if self._cycle_s > 0:
            await asyncio.sleep(self._cycle_s - time.monotonic() % self._cycle_s)
