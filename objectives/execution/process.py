"""A process that one term has to itself for as long as its run takes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from objectives.errors import ExecutionError, ObjectiveError
from objectives.execution.messages import receive, send
from objectives.regularizer import Regularizer
from objectives.term import Term

# From its start until it has imported torch and the term's module.
START_S = 120.0
_STOP_S = 2.0
# What pickling raises.
UNSENDABLE = (pickle.PicklingError, TypeError, AttributeError)


class TermProcess:
    """A process that calls one term, one call at a time; killed where a call takes too long, and then started anew.

    It is started afresh, not forked, so that no thread or lock of the run is in it, and it ends with the run.
    """

    def __init__(self, term: Term) -> None:
        self._module, self._name = importable(term)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, doing: str, regularizer: Regularizer, *arguments: object) -> Any:
        """What `objectives.execution.respond.FUNCTIONS` has under `doing`, in that process.

        Raises:
            ObjectiveError: what the function raises.
            ExecutionError: it took longer than the term's limit, its process ended, or an argument cannot be pickled.
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
            raise ObjectiveError(answer)
        return answer

    def close(self) -> None:
        """End the process; a busy one is killed."""
        with self._lock:
            if self._process is not None:
                self._connection.close()
                try:
                    self._process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    self._kill()
                self._process = None

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._process, self._connection = start_python("objectives.execution.worker")
        send(self._connection, (self._module, self._name))
        succeeded, why_not = self._receive(START_S, "its process took longer than {:g} s to start and was killed")
        if not succeeded:
            self._kill()
            raise ExecutionError(why_not)

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
            f"its process ended with status {status}: look for a crash of what it calls, or for too little memory"
        )

    def _kill(self) -> int:
        assert self._process is not None
        self._connection.close()
        try:
            return self._process.wait(0.5)  # for its own status, where it has ended by itself
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._process = None


def start_python(module: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start ``python -m module ... FD``; returns it with the other end of the pipe that its last argument numbers."""
    connection, other = Pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, str(other.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            env=os.environ | {"PYTHONPATH": python_path()},
            start_new_session=True,  # Ctrl-C is for the run, which ends it
        )
    finally:
        other.close()
    return process, connection


def python_path() -> str:
    """Where this process imports from."""
    return os.pathsep.join(each or str(Path.cwd()) for each in sys.path)


def sent_fields(regularizer: Regularizer) -> dict[str, Any]:
    """What another process is told of a regularizer beside its term."""
    return {key: getattr(regularizer, key) for key in ("name", "params", "on_error")}


def unsendable(error: Exception) -> ExecutionError:
    """What is said of an argument that raises one of `UNSENDABLE`."""
    return ExecutionError(f"its parameters or features cannot go to its process ({error})")


def importable(term: Term) -> tuple[str, str]:
    """The module to import and the name that the term is then registered as.

    Raises:
        ExecutionError: another process cannot find it.
    """
    function = term.evaluate
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        raise ExecutionError(
            f"{function.__module__}.{function.__qualname__} cannot be imported by another process: define it with "
            "`@regularizer` at the top of a module that is not the program itself"
        )
    return function.__module__, term.name
