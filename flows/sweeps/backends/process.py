"""Run trials in local processes, forked from a process that has imported all modules, so that they start quickly.

Threads would share one interpreter, and with it one core.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
from prefect import State
from prefect.context import hydrated_context, serialize_context
from prefect.exceptions import TerminationSignal

from blocks.errors import ConfigError, GuardError, TinkerFlowsError, reason
from blocks.files.local import home, private_folder
from flows.config.flow_lookup import SweptConfig, find_flow
from flows.monitoring.drain import deliver_events
from flows.monitoring.progress import StepCallback, step_callback
from flows.runs.cli import silence_console_logs
from flows.sweeps.protocols import TrialOutcome
from objectives.errors import ObjectiveError

# Time limit for a stopping trial to finish its step and save a checkpoint.
STOP_S = 60.0


class TrialProcess:
    """Runner of trials in a local process; each trial is a child of the current flow run.

    A process that ended is restarted for the next trial.
    """

    def __init__(self, flow: str) -> None:
        self._flow = flow
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["flows.sweeps.backends.process", find_flow(flow).module])
        self._payload = cloudpickle.dumps((dict(os.environ), serialize_context()))
        self._log = str(home() / "logs" / "trials.log")
        self._closed = False
        self._start()

    def run(self, config: SweptConfig, watch: StepCallback) -> TrialOutcome:
        """Run the flow to its end; `watch` receives the metrics of each step and may return a reason to stop."""
        if not self._process.is_alive() and not self._closed:
            self._start()
        try:
            self._connection.send(config)
            while not isinstance(message := self._connection.recv(), TrialOutcome):
                self._connection.send(watch(*message))
        except (EOFError, OSError):
            self._process.join(5)
            status = self._process.exitcode
            why = f"The trial's process exited with status {status}: check the memory and the log {self._log}."
            return TrialOutcome("stopped") if self._closed else TrialOutcome("failed", why, True)
        return message

    def request_stop(self) -> None:
        """Stop the current trial after its step, as Ctrl-C does; the process starts no further trial."""
        self._closed = True
        if self._process.pid and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGINT)

    def close(self, *, kill: bool = False) -> None:
        """End the process; `kill` does not wait for the current trial."""
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
        # Carries no data: it closes when this process ends for any reason.
        alive, self._alive = self._context.Pipe(duplex=False)
        arguments = (other, alive, self._flow, self._payload, self._log)
        self._process = self._context.Process(target=_serve, args=arguments, name="trials", daemon=True)
        self._process.start()
        other.close()
        alive.close()


def _serve(connection: Connection, alive: Connection, flow: str, payload: bytes, log: str) -> None:
    """Run each received config until the connection closes."""
    os.setsid()  # Ctrl-C reaches only the sweep, which forwards it
    threading.Thread(target=_exit_with, args=(alive,), daemon=True).start()
    environment, context = cloudpickle.loads(payload)
    os.environ.clear()
    os.environ.update(environment)
    private_folder(Path(log).parent)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    silence_console_logs()

    def watch(step: int, metrics: Mapping[str, float]) -> str:
        connection.send((step, dict(metrics)))
        return connection.recv()

    train_flow = find_flow(flow)
    try:
        with hydrated_context(context), step_callback(watch):
            while True:
                connection.send(run_to_outcome(partial(train_flow.flow, connection.recv(), return_state=True)))
    except (EOFError, OSError, KeyboardInterrupt):
        deliver_events()


def _exit_with(alive: Connection) -> None:
    """Exit when the sweep's process ends, even by a kill -9, which a busy trial would not notice."""
    with suppress(EOFError, OSError):
        alive.recv_bytes()
    os._exit(1)


def completed_outcome(state: State[Any]) -> TrialOutcome:
    """Return the outcome of a completed flow run, with the reason if it ended early or was not promoted."""
    return TrialOutcome("completed", (state.message or "") if state.name in ("BudgetSpent", "NotPromoted") else "")


def run_to_outcome(run: Callable[[], State[Any]]) -> TrialOutcome:
    """Run a flow and return its outcome; errors of the config, the guards or the objective are not retryable."""
    try:
        state = run()
    except (KeyboardInterrupt, TerminationSignal):
        return TrialOutcome("stopped")
    except Exception as error:  # noqa: BLE001  # such as a Prefect server that is down or rejects the run
        return TrialOutcome("failed", f"The flow could not run: {reason(error)}.", True)
    if state.is_completed():
        return completed_outcome(state)
    if state.is_cancelled() or state.is_cancelling():  # cancelling: the cancel came after the last step
        return TrialOutcome("stopped", state.message or "")
    error = state.result(raise_on_failure=False)
    if not isinstance(error, Exception):
        return TrialOutcome("failed", state.message or f"The flow run ended in the state {state.name}.", True)
    known = isinstance(error, TinkerFlowsError | ObjectiveError)
    sentence = str(error) if known else f"{type(error).__name__}: {reason(error)}."
    return TrialOutcome("failed", sentence, not isinstance(error, ConfigError | GuardError | ObjectiveError))
