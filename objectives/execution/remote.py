"""Calls of terms, encoded as bytes and run in the workers of a task runner."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from objectives.errors import ExecutionError
from objectives.execution.messages import encode
from objectives.execution.process import importable, sent_fields, unsendable
from objectives.execution.respond import load_term, worker_runner
from objectives.execution.runner import without_datums
from objectives.term import Regularizer
from objectives.term_weights.schedule import Constant


def encode_call(doing: str, regularizer: Regularizer, arguments: Sequence[object]) -> bytes:
    """Encode a call of a term's function for a worker.

    Args:
        doing: key of `objectives.execution.runner.FUNCTIONS`, such as "evaluating", which messages show.

    Raises:
        ExecutionError: a worker cannot import the term, or an argument cannot be pickled.
    """
    module, name = importable(regularizer.term)
    sent = [without_datums(argument) for argument in arguments]
    try:
        return encode((module, name, doing, sent_fields(regularizer), regularizer.timeout_s, sent))
    except Exception as error:
        raise unsendable(error) from error


def run_call(call: bytes) -> bytes:
    """Run an encoded call in this worker; return its pickled result.

    The time limit starts after the import of the term, so it covers neither this nor the wait for a free worker.

    Raises:
        ObjectiveError: the function raised.
        ExecutionError: the call exceeded the time limit, the term cannot be imported here, or its result cannot be
            pickled.
    """
    module, name, doing, fields, timeout_s, arguments = pickle.loads(call)
    term = load_term(module, name)
    # The weight has no effect here: the run applies its own to the result.
    regularizer = Regularizer(term=term, schedule=Constant(value=1.0), timeout_s=timeout_s, **fields)
    result = worker_runner().call(doing, regularizer, *arguments)
    try:
        return encode(result)
    except Exception as error:  # pickling a user's object can raise anything
        raise ExecutionError(f"its result cannot be pickled ({error}); return plain data") from error
