"""Workers of a run for tests that call tasks outside a flow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tasks.common.event_loop import open_workers


@pytest.fixture(autouse=True)
def workers() -> Iterator[None]:
    """Open the workers that `submit` and `run_coroutine` use."""
    with open_workers():
        yield
