"""Defer Ctrl-C, SIGTERM, and a cancel or suspension in the UI until the current step or evaluation is saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from itertools import dropwhile, islice
from types import FrameType

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import FlowRun
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext

from blocks.terminal import print_notice
from tasks.common.internals.prefect import FlowRunSuspensionRequest, deferred_suspension
from tasks.common.service_errors import TRANSIENT_ERRORS

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SignalHandler = Callable[[int, FrameType | None], object] | int | None
POLL_EVERY_S = 5.0
RESTARTED = "Restarted after a crash."  # message of the state with which the automation schedules a crashed run again


class RunCancelled(Exception):
    """Raised to end a run that was cancelled in the UI or by its step callback."""


class StopRequest:
    """Record of whether a signal, a cancel or a suspension has asked the run to stop.

    The first signal is deferred; a second one stops the process at once.
    """

    def __init__(self, flow_run: FlowRun | None, suspension: FlowRunSuspensionRequest) -> None:
        self._flow_run, self._suspension = flow_run, suspension
        self._signal: int | None = None
        self._cancelled = False
        self._reason = "The run was cancelled; start it again to resume from its last checkpoint."
        self._handlers: dict[int, SignalHandler] = {}

    @property
    def requested(self) -> bool:
        return self._cancelled or self._signal is not None or self._suspension.is_requested()

    def cancel(self, reason: str) -> None:
        """Request a stop, as a cancel in the UI does."""
        self._cancelled, self._reason = True, reason

    def raise_if_requested(self) -> None:
        """Raise the deferred signal, RunCancelled after a cancel, or Prefect's Pause after a suspension.

        A SIGTERM with which a worker cancels its flow run counts as the cancel. If the program has a handler of its own
        for the signal, which returns, KeyboardInterrupt is raised after it.
        """
        # Prefect would set the run of a SIGTERM to Crashed, and the restart automation would start it again.
        if self._signal == signal.SIGTERM and self._is_flow_run_cancelled():
            raise RunCancelled(self._reason)
        if self._signal is not None:
            self._restore_handlers()
            signal.raise_signal(self._signal)
            raise KeyboardInterrupt
        if self._cancelled:
            raise RunCancelled(self._reason)
        self._suspension.raise_if_requested()

    def _install_handlers(self) -> None:
        for number in SIGNALS:
            # A shell script lets its background jobs ignore Ctrl-C, which is meant for the job in the foreground.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._handle)

    def _restore_handlers(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._signal = number
        self._restore_handlers()
        print_notice("\nStopping as soon as the current step or evaluation ends. Press Ctrl-C again to stop at once.")

    def _is_flow_run_cancelled(self) -> bool:
        if self._flow_run:
            with suppress(*TRANSIENT_ERRORS), get_client(sync_client=True) as client:
                states = [run.state for run in _with_callers(client, self._flow_run)]
                return any(state.is_cancelling() or state.is_cancelled() for state in states if state)
        return False

    def _poll(self, closed: threading.Event, flow_run: FlowRun) -> None:
        """Poll the Prefect server for a cancel of a flow run or of one of its callers."""
        while not self._cancelled and not closed.wait(POLL_EVERY_S):
            # Ignore errors: the server may be down, and another program may respond at its address.
            with suppress(*TRANSIENT_ERRORS), get_client(sync_client=True) as client:
                watched = [run.id for run in _with_callers(client, flow_run)]
                while not self._cancelled and not closed.is_set():
                    states = [client.read_flow_run(flow_run_id).state for flow_run_id in watched]
                    if any(state.is_cancelling() for state in states if state):
                        self._cancelled = True  # never set it to False: `cancel` may have set it meanwhile
                    closed.wait(POLL_EVERY_S)


def _with_callers(client: SyncPrefectClient, flow_run: FlowRun) -> Sequence[FlowRun]:
    """Read a flow run and all flow runs that wait for it, such as that of `rlhf` for its stages."""
    runs = [client.read_flow_run(flow_run.id)]
    while (task_run := runs[-1].parent_task_run_id) and (caller := client.read_task_run(task_run).flow_run_id):
        runs.append(client.read_flow_run(caller))
    return runs


def raise_if_restarted_after_cancel() -> None:
    """Raise RunCancelled if the flow run or one of its callers was cancelled, crashed, and was restarted.

    The process of a cancelled run ends as Crashed if, for example, the server did not respond at the end.
    """
    context = FlowRunContext.get()
    if context and context.flow_run:
        with suppress(*TRANSIENT_ERRORS), get_client(sync_client=True) as client:
            for run in _with_callers(client, context.flow_run):
                if run.run_count > 1 and _is_restart_after_cancel(client.read_flow_run_states(run.id)):
                    raise RunCancelled("The run was cancelled before it crashed; start it again to resume it.")


def _is_restart_after_cancel(states: Sequence[State]) -> bool:
    """Return whether a cancel came before the newest start and after the previous start, without a later retry.

    Args:
        states: history of a flow run that has started, oldest first.
    """
    newest_first = dropwhile(lambda state: not state.is_running(), reversed(states))
    for state in islice(newest_first, 1, None):
        is_retry = state.name == "AwaitingRetry" and state.message != RESTARTED
        if state.is_cancelling() or state.is_running() or state.is_cancelled() or is_retry:
            return state.is_cancelling()
    return False


@contextmanager
def deferred_interrupts() -> Iterator[StopRequest]:
    """Turn Ctrl-C, SIGTERM, and a cancel or a suspension in the UI into a stop request within this block.

    Signals reach only the main thread. If a worker started the flow run, it sends SIGTERM on a cancel. A flow run that
    no worker started gets no signal, so a thread polls the Prefect server. Prefect itself notices a suspension, and
    would raise Pause from the next task.
    """
    context = FlowRunContext.get()
    flow_run = context.flow_run if context else None
    with deferred_suspension() as suspension:
        stop, closed = StopRequest(flow_run, suspension), threading.Event()
        if threading.current_thread() is threading.main_thread():
            stop._install_handlers()
        poller = None
        if flow_run and not flow_run.deployment_id:
            # The context names the Prefect server; without it, Prefect would start an ephemeral one.
            poll = partial(copy_context().run, stop._poll, closed, flow_run)
            poller = threading.Thread(target=poll, name="stop", daemon=True)
            poller.start()
        try:
            yield stop
        finally:
            stop._restore_handlers()
            closed.set()
            if poller:
                poller.join(POLL_EVERY_S)  # bounded, because the server may not respond
