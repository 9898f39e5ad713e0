from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from blocks.collector import freeze_existing_objects, no_collections


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Leave the collector as it was."""
    was_enabled = gc.isenabled()
    yield
    gc.enable() if was_enabled else gc.disable()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_imports_leave_the_collector_enabled_or_disabled(is_enabled: bool) -> None:
    gc.enable() if is_enabled else gc.disable()
    with no_collections():
        assert not gc.isenabled()
    assert gc.isenabled() == is_enabled


def test_frozen_objects_stay_frozen() -> None:
    with no_collections():
        imported = [[]]
    freeze_existing_objects()
    assert not any(item is imported for item in gc.get_objects())
