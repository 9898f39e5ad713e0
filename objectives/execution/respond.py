"""Execution of a call in a term's process or in a worker of a task runner."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch

from objectives.config.term_lookup import registered_terms
from objectives.errors import ExecutionError, ObjectiveError
from objectives.evaluate import failure
from objectives.execution.process import SentFields
from objectives.execution.runner import TermRunner
from objectives.term import Regularizer, Term
from objectives.term_weights.schedule import Constant

T = TypeVar("T")


def load_term(module: str, name: str) -> Term:
    """Import a module and return the term that it registers.

    Raises:
        ExecutionError: the module cannot be imported or does not register the term.
    """
    try:
        importlib.import_module(module)
        return registered_terms()[name]
    except Exception as error:
        raise ExecutionError(
            f"its process or worker could not import it from {module} ({type(error).__name__}: {error}); install the "
            "module there"
        ) from error


def respond(
    term: Term, doing: str, fields: SentFields, arguments: Sequence[object], deliver: Callable[[object], T]
) -> T:
    """Run a call and deliver ``(True, result)``, or ``(False, error)`` if the call fails.

    Returns:
        The result of `deliver`.

    Raises:
        OSError: `deliver` raised it, because the connection is closed.
    """
    regularizer = Regularizer(term=term, schedule=Constant(value=1.0), **fields)
    try:
        answer = (True, worker_runner().call(doing, regularizer, *arguments))
    except ObjectiveError as error:
        answer = (False, error)
    try:
        return deliver(answer)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  # pickling a user's object can raise anything
        reason = ObjectiveError(f"its result cannot be pickled ({error}); return plain data")
        return deliver((False, failure(regularizer, doing, reason)))


@cache
def worker_runner() -> TermRunner:
    """Return the runner of this process; limit torch to one thread per operation, because other terms compute too."""
    torch.set_num_threads(1)
    return TermRunner()


def end_with_parent() -> None:
    """End this process when its parent ends, even by SIGKILL while a term is busy."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
