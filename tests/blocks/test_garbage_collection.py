from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from blocks.garbage_collection import no_collections, no_collector_pauses


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Enable the collector after the test, or disable it, as it was before."""
    was_enabled = gc.isenabled()
    yield
    gc.enable() if was_enabled else gc.disable()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_imports_leave_the_collector_enabled_or_disabled(is_enabled: bool) -> None:
    gc.enable() if is_enabled else gc.disable()
    with no_collections():
        assert not gc.isenabled()
    assert gc.isenabled() == is_enabled


def test_existing_objects_are_not_scanned_during_a_run() -> None:
    with no_collections():
        imported = [[]]
    with no_collector_pauses():
        created = [[]]
        scanned = {id(item) for item in gc.get_objects()}
        assert id(created) in scanned
        assert id(imported) not in scanned
    assert id(imported) in {id(item) for item in gc.get_objects()}
