"""The promise of a `prepare` that a run needs to ask only once about each datum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_VERSION = "__tinker_flows_per_datum__"


def per_datum(version: int = 1) -> Callable[[F], F]:
    """Declare that a ``prepare`` returns a list with one feature for each datum, and that each depends on nothing but
    that datum's tokens, which of them are trained, its text, and the parameters.

    A run then prepares each datum once, and keeps its feature as JSON, by the type that the function is
    annotated to return, such as ``list[Verdict]``.

    Args:
        version: raise it when what the function calls in other modules comes to other features, so that kept ones
            are not used again; its own module is looked at.

    >>> @per_datum()
    ... def count_words(batch) -> list[int]:
    ...     return [len(text.split()) for text in batch.texts_D]
    >>> version_of(count_words), version_of(len)
    (1, None)
    """

    def declare(prepare: F) -> F:
        setattr(prepare, _VERSION, version)
        return prepare

    return declare


def version_of(prepare: Callable[..., Any] | None) -> int | None:
    """The version of a ``prepare`` that is declared per datum; None for any other."""
    return getattr(prepare, _VERSION, None)
