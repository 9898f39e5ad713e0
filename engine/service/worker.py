"""The one thread that runs torch, so that the event loop always answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class Worker:
    """Runs functions one after another, in the order they were given, on a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    async def run(self, function: Callable[[], Result]) -> Result:
        """Await ``function()``; its exceptions come out here."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def stop(self) -> None:
        """Finish what runs, drop what waits."""
        self._thread.shutdown(cancel_futures=True)
