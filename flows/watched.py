"""A run that is watched: whoever started it sees the metrics of each step, and may ask it to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from flows.stop import Stop

Watcher = Callable[[int, Mapping[str, float]], str]

_WATCHER: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Runs in this block show each step and its metrics to a function, which returns why to stop, or nothing."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def show_metrics(step: int, metrics: Mapping[str, float], stop: Stop) -> None:
    """Show the metrics of a step to whoever watches the run, and stop it where they say so."""
    watcher = _WATCHER.get()
    if watcher and (why := watcher(step, metrics)):
        stop.ask(why)
