"""Internals of transformers that the project changes. Only this module changes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from transformers import utils


@contextmanager
def without_sklearn() -> Iterator[None]:
    """Import modules of transformers in this block without scikit-learn and SciPy, which take a third of a second.

    transformers uses scikit-learn only to generate with an assistant model, and a run samples on its service.
    """
    with patch.object(utils, "is_sklearn_available", lambda: False):
        yield
