"""What Dask and Ray have in common: the library of an extra, one connection for all terms, and calls as bytes."""

from __future__ import annotations

import importlib
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from objectives.errors import ExecutionError, ObjectiveError
from objectives.execution.messages import encode
from objectives.execution.process import UNSENDABLE, sent_fields, unsendable
from objectives.regularizer import Regularizer

T = TypeVar("T")

_MODULES = {"dask": "distributed", "ray": "ray"}


def library(execution: str) -> Any:
    """The library of an execution.

    Raises:
        ExecutionError: its extra is not installed; a clause.
    """
    try:
        return importlib.import_module(_MODULES[execution])
    except ImportError as error:
        raise ExecutionError(
            f"it needs the extra {execution!r}, which cannot be imported ({error}): "
            f"pip install 'tinker-flows[{execution}]'"
        ) from error


def num_workers() -> int:
    """One for each core; two at least, since a term prepares while another evaluates, and eight at most: each imports
    torch, which takes 0.3 GB."""
    return min(max(len(os.sched_getaffinity(0)), 2), 8)


class Shared(Generic[T]):
    """What all terms of this process use: opened for the first, closed behind the last, replaced where it broke."""

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


def body_of(regularizer: Regularizer, arguments: Sequence[object]) -> bytes:
    """What a worker is sent of a call.

    Raises:
        ExecutionError: an argument cannot be pickled.
    """
    try:
        return encode((sent_fields(regularizer), arguments))
    except UNSENDABLE as error:
        raise unsendable(error) from error


def returned(answer: bytes) -> Any:
    """What the function of a call returned.

    Raises:
        ObjectiveError: it did not.
    """
    succeeded, value = pickle.loads(answer)
    if not succeeded:
        raise ObjectiveError(value)
    return value


def too_late(timeout_s: float | None) -> str:
    """Why a worker was killed."""
    return f"it took longer than its timeout_s of {timeout_s:g} s, and its worker was killed"


def first_line(error: BaseException) -> str:
    """What went wrong with a worker, without the trace that its library adds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
