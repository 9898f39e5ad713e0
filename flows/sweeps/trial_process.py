"""Processes that run trials one after another, forked from one that has imported everything: they start at once.

A process, because a training loop in a thread shares its interpreter with the others: four of them would use one core.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import cloudpickle
from prefect import State
from prefect.context import hydrated_context, serialize_context
from prefect.exceptions import TerminationSignal

from blocks.errors import ConfigError, GuardError, TinkerFlowsError, reason
from blocks.home import home
from flows.command_line import keep_prefect_off_the_terminal
from flows.config import RunConfig
from flows.find_flow import find_flow
from flows.recorded import deliver_events
from flows.watched import watched_by
from objectives.errors import ObjectiveError

# A run that is asked to stop ends its step and saves it.
STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class End:
    """How a run of a trial ended.

    Attributes:
        how: `stopped` is one that was asked to stop and saved itself.
        reason: why it failed, one sentence.
        may_pass: whether the same again may go well.
    """

    how: Literal["completed", "stopped", "failed"]
    reason: str = ""
    may_pass: bool = False


class TrialProcess:
    """A process that runs one flow as a child of the flow run under way, with one config after another.

    One that ended, whatever of, is started anew for the next config.
    """

    def __init__(self, flow: str) -> None:
        self._flow = flow
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["flows.sweeps.trial_process", find_flow(flow).module])
        self._told = cloudpickle.dumps((dict(os.environ), serialize_context()))
        self._log = str(home() / "logs" / "trials.log")
        self._closed = False
        self._start()

    def run(self, config: RunConfig, watch: Callable[[int, Mapping[str, float]], str]) -> End:
        """Run the flow to its end; each step's metrics are shown to `watch`, which may return why to stop."""
        if not self._process.is_alive() and not self._closed:
            self._start()
        try:
            self._connection.send(config)
            while not isinstance(message := self._connection.recv(), End):
                self._connection.send(watch(*message))
        except (EOFError, OSError):
            self._process.join(5)
            status = self._process.exitcode
            why = f"Its process ended with status {status}: look for too little memory, and in {self._log}."
            return End("stopped") if self._closed else End("failed", why, True)
        return message

    def ask_to_stop(self) -> None:
        """Have the run under way end its step and save it, as Ctrl-C does; none begins after it."""
        self._closed = True
        if self._process.pid and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGINT)

    def close(self, *, kill: bool = False) -> None:
        """End the process, which `kill` does without waiting for the run under way."""
        self._closed = True
        if kill:
            self._process.kill()
        else:
            self._connection.close()
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _start(self) -> None:
        self._connection, other = self._context.Pipe()
        # Nothing is ever sent on it: it closes when this process ends, however it does.
        alive, self._alive = self._context.Pipe(duplex=False)
        arguments = (other, alive, self._flow, self._told, self._log)
        self._process = self._context.Process(target=_serve, args=arguments, name="trials", daemon=True)
        self._process.start()
        other.close()
        alive.close()


def _serve(connection: Connection, alive: Connection, flow: str, told: bytes, log: str) -> None:
    """Run what is sent, until the other side is gone."""
    os.setsid()  # Ctrl-C is for the sweep, which passes it on
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()
    environment, context = cloudpickle.loads(told)
    os.environ.clear()
    os.environ.update(environment)
    Path(log).parent.mkdir(exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    keep_prefect_off_the_terminal()

    def watch(step: int, metrics: Mapping[str, float]) -> str:
        connection.send((step, dict(metrics)))
        return connection.recv()

    found = find_flow(flow)
    try:
        with hydrated_context(context), watched_by(watch):
            while True:
                connection.send(end_of(partial(found.flow, connection.recv(), return_state=True)))
    except (EOFError, OSError, KeyboardInterrupt):
        deliver_events()


def _end_with(alive: Connection) -> None:
    """A busy trial hears nothing of the end of its sweep, not even of a kill -9."""
    with suppress(EOFError, OSError):
        alive.recv_bytes()
    os._exit(1)


def end_of(run: Callable[[], State[Any]]) -> End:
    try:
        state = run()
    except (KeyboardInterrupt, TerminationSignal):
        return End("stopped")
    except Exception as error:  # noqa: BLE001  # of a Prefect server that is away, or refuses
        return End("failed", f"Its flow could not run: {reason(error)}.", True)
    if state.is_completed():
        return End("completed", state.message or "" if state.name == "BudgetSpent" else "")
    if state.is_cancelled():
        return End("stopped", state.message or "")
    error = state.result(raise_on_failure=False)
    if not isinstance(error, Exception):
        return End("failed", state.message or f"It ended as {state.name}.", True)
    known = isinstance(error, TinkerFlowsError | ObjectiveError)
    sentence = str(error) if known else f"{type(error).__name__}: {reason(error)}."
    return End("failed", sentence, not isinstance(error, ConfigError | GuardError | ObjectiveError))
