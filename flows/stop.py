"""Ctrl-C and a cancel from the UI, between two steps: what is under way ends and is saved, and then the run does."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from types import FrameType
from typing import Any

import httpx
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOK_EVERY_S = 5.0
# What Prefect's client raises of a server that is down, and of an answer that is not a server's.
_PASSING = (httpx.HTTPError, PrefectException, RuntimeError, ValueError)


class CancelledInTheUI(Exception):
    """A run that no worker started was cancelled, in the UI or by what watches it: nothing but itself can end it."""


class Stop:
    """Whether somebody asked the run to stop; a signal that comes a second time stops it at once, as any program."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._cancelled = False
        self._why = "The run was cancelled; started again, it goes on from what it saved."
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self._cancelled or self._signal is not None

    def ask(self, why: str) -> None:
        """Ask the run to stop as a cancel in the UI does, for a reason."""
        self._cancelled, self._why = True, why

    def obey(self) -> None:
        """Raise what the signal would have raised when it came: what was to be done before is done."""
        if self._signal is not None:
            self._restore()
            signal.raise_signal(self._signal)
        if self._cancelled:
            raise CancelledInTheUI(self._why)

    def _listen(self) -> None:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, _: FrameType | None) -> None:
        self._signal = number
        self._restore()
        print("\nThe step under way ends and is saved; once more stops at once.", file=sys.stderr)

    def _look(self, ended: threading.Event, flow_run: FlowRunContext) -> None:
        """Ask the Prefect server now and then; a worker would send a signal, but only to what it has started."""
        assert flow_run.flow_run is not None
        while not self._cancelled and not ended.wait(LOOK_EVERY_S):
            # The server may be down for a while, or something else answer in its place; the run goes on without it.
            with suppress(*_PASSING), get_client(sync_client=True) as client:
                while not self._cancelled and not ended.is_set():
                    state = client.read_flow_run(flow_run.flow_run.id).state
                    self._cancelled = state is not None and state.is_cancelling()
                    ended.wait(LOOK_EVERY_S)


@contextmanager
def listening_for_stop() -> Iterator[Stop]:
    """Put off Ctrl-C and SIGTERM to a moment when the run can obey; only a process's main thread hears them."""
    stop, ended = Stop(), threading.Event()
    flow_run = FlowRunContext.get()
    if threading.current_thread() is threading.main_thread():
        stop._listen()
    looking = None
    if flow_run and flow_run.flow_run and not flow_run.flow_run.deployment_id:
        # In this thread's context, which names the server: outside of it, Prefect would start an ephemeral one.
        look = partial(copy_context().run, stop._look, ended, flow_run)
        looking = threading.Thread(target=look, name="stop", daemon=True)
        looking.start()
    try:
        yield stop
    finally:
        stop._restore()
        ended.set()
        if looking:
            looking.join(LOOK_EVERY_S)  # it may be waiting for a server that is gone
