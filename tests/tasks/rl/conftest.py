"""Fixtures of tests that roll out groups without a flow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tinker
from rollout_parts import Snapshots

from tasks.common.task import inline_tasks


@pytest.fixture(scope="module")
def snapshots(engine_url: str) -> Iterator[Snapshots]:
    """Training client of the tiny model whose weights never change."""
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        yield Snapshots(service.create_sampling_client(base_model="tiny").result())


@pytest.fixture
def without_task_runs() -> Iterator[None]:
    """Call tasks directly, without a Prefect server."""
    with inline_tasks():
        yield
