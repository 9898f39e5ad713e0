"""Shared parts of Dask and Ray execution: optional libraries, one shared connection, and calls as bytes."""

from __future__ import annotations

import importlib
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Generic, TypeVar

from objectives.errors import ExecutionError, ObjectiveError
from objectives.execution.messages import encode
from objectives.execution.process import UNSENDABLE, sent_fields, unsendable
from objectives.term import Regularizer

T = TypeVar("T")

_MODULES = {"dask": "distributed", "ray": "ray"}


def library(execution: str) -> ModuleType:
    """Import the library of an execution.

    Raises:
        ExecutionError: the extra is not installed; the message is a clause.
    """
    try:
        return importlib.import_module(_MODULES[execution])
    except ImportError as error:
        raise ExecutionError(
            f"it needs the extra {execution!r}, which cannot be imported ({error}); run "
            f"pip install 'tinker-flows[{execution}]'"
        ) from error


def num_workers() -> int:
    """Return one worker per core, but at least two, to prepare and evaluate in parallel, and at most eight.

    A worker imports torch, which takes 0.3 GB.
    """
    return min(max(len(os.sched_getaffinity(0)), 2), 8)


class Shared(Generic[T]):
    """Resource shared by all terms of this process.

    The first user opens it, the last user closes it, and a broken resource is replaced. It is process-wide because a
    connection to a cluster, and Ray's in particular, exists once per process.
    """

    def __init__(self, opened: Callable[[], T], works: Callable[[T], bool], close: Callable[[T], None]) -> None:
        self._open, self._works, self._close = opened, works, close
        self._lock = threading.Lock()
        self._users: set[int] = set()
        self._value: T | None = None

    def use(self, user: object) -> T:
        with self._lock:
            if self._value is not None and not self._works(self._value):
                value, self._value = self._value, None
                self._close(value)
            if self._value is None:
                self._value = self._open()
            self._users.add(id(user))
            return self._value

    def leave(self, user: object) -> None:
        with self._lock:
            self._users.discard(id(user))
            if not self._users and self._value is not None:
                value, self._value = self._value, None
                self._close(value)


def encode_call(regularizer: Regularizer, arguments: Sequence[object]) -> bytes:
    """Encode a call for a worker.

    Raises:
        ExecutionError: an argument cannot be pickled.
    """
    try:
        return encode((sent_fields(regularizer), arguments))
    except UNSENDABLE as error:
        raise unsendable(error) from error


def decode_result(answer: bytes) -> object:
    """Decode the result of a call.

    Raises:
        ObjectiveError: the call failed.
    """
    succeeded, value = pickle.loads(answer)
    if not succeeded:
        raise ObjectiveError(value)
    return value


def too_late(timeout_s: float | None) -> str:
    """Return the error clause for a worker that was killed."""
    return f"it took longer than its timeout_s of {timeout_s:g} s, and its worker was killed"


def first_line(error: BaseException) -> str:
    """Return an error's type and first line, without the traceback that the library adds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
