"""What a process of a term does with a call, whoever brought it there."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from objectives.errors import ObjectiveError
from objectives.evaluate import evaluate_term, failure, prepare_features
from objectives.find_term import registered_terms
from objectives.regularizer import Regularizer
from objectives.schedule import Constant
from objectives.term import Term

T = TypeVar("T")

FUNCTIONS: dict[str, Callable[..., Any]] = {"preparing": prepare_features, "evaluating": evaluate_term}


def load_term(module: str, name: str) -> Term:
    """The term that a module registers.

    Raises:
        ObjectiveError: it does not; a clause.
    """
    try:
        importlib.import_module(module)
        return registered_terms()[name]
    except Exception as error:
        raise ObjectiveError(f"it could not be imported there ({type(error).__name__}: {error})") from error


def respond(
    term: Term, doing: str, fields: Mapping[str, Any], arguments: Sequence[Any], deliver: Callable[[object], T]
) -> T:
    """Deliver whether a call succeeded, and what it returns or why it failed."""
    regularizer = Regularizer(term=term, schedule=Constant(value=1.0), **fields)
    try:
        answer = (True, FUNCTIONS[doing](regularizer, *arguments))
    except ObjectiveError as error:
        answer = (False, str(error))
    try:
        return deliver(answer)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever pickling the user's object raises; told to the other side
        reason = ObjectiveError(f"what it made cannot leave its process ({error})")
        return deliver((False, str(failure(regularizer, doing, reason))))


def end_with_parent() -> None:
    """End this process when its parent ends: a busy term hears nothing of the end of its run, not even of a kill -9."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
