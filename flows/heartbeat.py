"""Signs of life of a run: what the Prefect server needs to see that its process was killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect import tags
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

EVERY_S = 30
# On the runs that give them: the server must not wait for those of runs that do not.
TAG = "tinker-flows:heartbeat"


@contextmanager
def heartbeats() -> Iterator[None]:
    """Flow runs that start in this block tell the server every half minute that they live."""
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: EVERY_S}), tags(TAG):
        yield
