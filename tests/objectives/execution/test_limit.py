"""Time limits of functions that cannot be stopped."""

from __future__ import annotations

import threading
from contextvars import ContextVar, copy_context

import pytest

from objectives.errors import ExecutionError
from objectives.execution.limit import LimitedThreads

COLOUR: ContextVar[str] = ContextVar("colour")


def test_a_limited_function_reads_the_context_of_its_caller() -> None:
    """Prefect's `get_run_logger` is such a function."""

    def call() -> str:
        COLOUR.set("blue")
        return LimitedThreads().run("term", COLOUR.get, 60.0)

    assert copy_context().run(call) == "blue"


def test_a_caller_waits_for_all_of_its_abandoned_threads() -> None:
    """Two concurrent calls exceed their limits; the one that was abandoned last ends first."""
    threads = LimitedThreads()
    first, second, is_over = threading.Event(), threading.Event(), threading.Event()

    def outer() -> None:
        with pytest.raises(ExecutionError, match=r"longer than its timeout_s of 0\.01 s"):
            threads.run("term", first.wait, 0.01)
        second.wait()
        is_over.set()

    with pytest.raises(ExecutionError, match="longer than its timeout_s of 1 s"):
        threads.run("term", outer, 1.0)
    second.set()
    assert is_over.wait(60)
    with pytest.raises(ExecutionError, match="it is still busy with an earlier batch"):
        threads.run("term", lambda: None, 60.0)
    first.set()
    for thread in threading.enumerate():
        if thread.name == "term-term":
            thread.join(60)
    assert threads.run("term", lambda: 7, 60.0) == 7
