"""Pauses of the garbage collector, which otherwise scans half a million objects of imported modules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Import modules in this block without garbage collections, which would take a quarter of its time.

    Later collections do not scan the objects of these modules.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def no_collector_pauses() -> Iterator[None]:
    """Exclude existing objects from garbage collection in this block.

    Scanning them takes half a second, at unpredictable steps.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
