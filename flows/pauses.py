"""Steps without the pauses of the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def short_pauses() -> Iterator[None]:
    """Leave what is there out of the collections in this block.

    The modules of a run are half a million objects, and to look through them takes half a second, at steps that
    nobody can foresee.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
