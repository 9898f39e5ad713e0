"""Dedicated process of one term for the duration of a run."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypedDict

from objectives.errors import ExecutionError
from objectives.execution.messages import receive, send
from objectives.term import OnError, Regularizer, Term, definition_of
from objectives.term_weights.targets import TargetSpec

# Time limit for the start, including the imports of torch and the term's module.
START_S = 120.0
_STOP_S = 2.0
_POLL_S = 0.05
# Exceptions raised by pickling; a type's own pickling code raises the last two.
UNSENDABLE = (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError)


class SentFields(TypedDict):
    """Fields of a `Regularizer` that are sent to another process."""

    name: str
    params: Mapping[str, object]
    on_error: OnError
    estimator: str | None
    target: TargetSpec | None


class TermProcess:
    """Process that runs one term, one call at a time.

    A call that exceeds the time limit is killed with its process, and the next call starts a new one. The process is
    spawned, not forked, so it inherits no threads or locks. It ends with the run.

    Raises:
        ExecutionError: another process cannot import the term.
    """

    def __init__(self, term: Term) -> None:
        self._module, self._name = importable(term)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, doing: str, regularizer: Regularizer, *arguments: object) -> object:
        """Call the function `objectives.execution.runner.FUNCTIONS[doing]` in the process, which is started if needed.

        Raises:
            ObjectiveError: the function raised.
            ExecutionError: the process did not start, could not import the term, or ended; the call exceeded the time
                limit; or an argument cannot be pickled.
        """
        with self._lock:
            self._start()
            try:
                send(self._connection, (doing, sent_fields(regularizer), arguments))
            except UNSENDABLE as error:
                raise unsendable(error) from error
            except OSError as error:
                raise self._ended() from error
            too_late = "it took longer than its timeout_s of {:g} s, and its process was killed"
            succeeded, answer = self._receive(regularizer.timeout_s, too_late)
        if not succeeded:
            raise answer
        return answer

    def close(self) -> None:
        """End the process; kill it if it is busy."""
        while not self._lock.acquire(timeout=_POLL_S):  # a call is in progress, which ends with the process
            if self._process is not None:
                self._process.kill()
        try:
            if self._process is not None:
                self._connection.close()
                try:
                    self._process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    self._kill()
                self._process = None
        finally:
            self._lock.release()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._process, self._connection = start_python("objectives.execution.worker")
        try:
            send(self._connection, (self._module, self._name))
        except OSError as error:
            raise self._ended() from error
        succeeded, error = self._receive(START_S, "its process took longer than {:g} s to start and was killed")
        if not succeeded:
            self._kill()
            raise error

    def _receive(self, timeout_s: float | None, too_late: str) -> tuple[bool, Any]:
        try:
            if not self._connection.poll(timeout_s):
                self._kill()
                raise ExecutionError(too_late.format(timeout_s))
            return receive(self._connection)
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def _ended(self) -> ExecutionError:
        status = self._kill()
        return ExecutionError(
            f"its process ended with status {status}; check for a crash in its dependencies, or too little memory"
        )

    def _kill(self) -> int:
        assert self._process is not None
        self._connection.close()
        try:
            return self._process.wait(0.5)  # Get the exit status of a process that ended by itself.
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._process = None


def start_python(module: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start ``python -m module ... FD``; return the process and the connection to the pipe end ``FD``."""
    connection, other = Pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, str(other.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            env=os.environ | {"PYTHONPATH": python_path()},
            start_new_session=True,  # Ctrl-C reaches only the run, which then ends this process.
        )
    finally:
        other.close()
    return process, connection


def python_path() -> str:
    """Return this process's import path as a ``PYTHONPATH``."""
    return os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)


def sent_fields(regularizer: Regularizer) -> SentFields:
    """Return the fields of a regularizer that are sent to another process."""
    return {
        "name": regularizer.name,
        "params": regularizer.params,
        "on_error": regularizer.on_error,
        "estimator": regularizer.estimator,
        "target": regularizer.target,
    }


def unsendable(error: Exception) -> ExecutionError:
    """Return the error for an argument that cannot be pickled (`UNSENDABLE`)."""
    return ExecutionError(
        f"its parameters or features cannot be pickled for its process ({error}); use plain data, or another execution"
    )


def importable(term: Term) -> tuple[str, str]:
    """Return the module that registers a term, and its registered name.

    Raises:
        ExecutionError: another process cannot import the term.
    """
    function = definition_of(term.evaluate)
    if isinstance(term.evaluate, partial):
        raise ExecutionError(
            f"it is a functools.partial of {function.__module__}.{function.__qualname__}, which does not name the "
            "module that registers the term; define a function with `@regularizer` that calls it"
        )
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        raise ExecutionError(
            f"{function.__module__}.{function.__qualname__} cannot be imported by another process; define it with "
            "`@regularizer` at the top level of a module other than the main program"
        )
    return function.__module__, term.name
