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
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def freeze_existing_objects() -> None:
    """Exclude all existing objects from later garbage collections.

    Scanning them takes half a second, at unpredictable steps. Reference counts still free them.
    """
    gc.freeze()
