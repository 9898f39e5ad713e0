"""What runs in the process of a term: ``python -m objectives.execution.worker FD``, started by `TermProcess`."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from objectives.errors import ObjectiveError
from objectives.evaluate import evaluate_term, failure, prepare_features
from objectives.execution.messages import receive, send
from objectives.regularizer import Regularizer
from objectives.schedule import Constant
from objectives.term import registered_terms

FUNCTIONS: dict[str, Callable[..., Any]] = {"preparing": prepare_features, "evaluating": evaluate_term}


def serve(connection: Connection) -> None:
    """Load the term that the first message names, then answer calls until the other side is gone."""
    module, name = receive(connection)
    try:
        importlib.import_module(module)
        term = registered_terms()[name]
    except Exception as error:  # noqa: BLE001  # the user's module; told to the other side
        send(connection, (False, f"it could not be imported there ({type(error).__name__}: {error})"))
        return
    send(connection, (True, None))
    while True:
        doing, fields, arguments = receive(connection)
        regularizer = Regularizer(term=term, schedule=Constant(value=1.0), **fields)
        try:
            answer = (True, FUNCTIONS[doing](regularizer, *arguments))
        except ObjectiveError as error:
            answer = (False, str(error))
        try:
            send(connection, answer)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever pickling the user's object raises; told to the other side
            reason = ObjectiveError(f"what it made cannot leave its process ({error})")
            send(connection, (False, str(failure(regularizer, doing, reason))))


def _end_with(parent: int) -> None:
    """A busy term hears nothing of the end of its run, not even of a kill -9."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, OSError):  # the run has ended, and waits for this process: no time to take it down in order
        sys.stdout.flush()
        os._exit(0)
