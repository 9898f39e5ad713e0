"""Wait for a condition in a test."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T | None], description: str, limit_s: float = 60.0) -> T:
    """Wait until a condition returns a true value and return the value."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.05)
    raise AssertionError(f"{description} did not appear within {limit_s:.0f} s")
