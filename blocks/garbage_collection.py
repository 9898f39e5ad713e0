"""Keep the garbage collector from scanning the half a million objects of imported modules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Import modules in this block without garbage collections, which would take a quarter of its time.

    Later collections do not scan the objects of these modules, until the next `no_collector_pauses` has ended.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def no_collector_pauses() -> Iterator[None]:
    """Exclude existing objects from garbage collection in this block.

    Scanning them takes half a second, at unpredictable steps. After the block they are scanned again, because a process
    with many runs would otherwise keep the reference cycles of every run.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
