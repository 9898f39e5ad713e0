"""Segments: what lies between two checkpoints is tried again as a whole, because no request of it may be sent twice."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from prefect.logging import get_run_logger

from blocks.errors import ServiceLostError
from flows.blocks_of import storage_of
from flows.config import RunConfig
from tasks.checkpoint import resumable

T = TypeVar("T")

LONGEST_PAUSE_S = 60.0


def in_segments(config: RunConfig, attempt: Callable[[Sequence[str]], T]) -> T:
    """Open a run, and where the service is lost under it, open it again at its last checkpoint.

    Args:
        attempt: opens the run and goes on to its end, given why it was opened again, each time.

    Raises:
        ServiceLostError: the service was lost once more than `max_restarts` times without a checkpoint between.
    """
    reasons: list[str] = []
    num_in_a_row = 0
    while True:
        step = _last_step(config)
        try:
            return attempt(tuple(reasons))
        except ServiceLostError as error:
            num_in_a_row = num_in_a_row + 1 if _last_step(config) == step else 1
            if num_in_a_row > config.max_restarts:
                raise
            reasons.append(f"after step {_last_step(config)}: {error}")
            pause_s = min(2.0**num_in_a_row, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
            get_run_logger().warning("%s The run goes on from its last checkpoint in %.0f s.", error, pause_s)
            time.sleep(pause_s)


def _last_step(config: RunConfig) -> int:
    with storage_of(config).run_directory(config.run_name) as directory:
        records = resumable(directory)
    return int(records[0].batch or 0) if records else 0
