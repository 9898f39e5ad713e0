"""Code that is graded beside whatever else an event loop does: as many programs at once as there are processors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from tasks.graders import run_tests
from tasks.sandbox import Limits, Outcome

_RUNNERS = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="sandbox")


async def run_tests_apart(answer: str, row: Mapping[str, str], limits: Limits) -> tuple[bool, Outcome]:
    """`run_tests` without standing in the loop's way."""
    return await asyncio.get_running_loop().run_in_executor(_RUNNERS, run_tests, answer, row, limits)
