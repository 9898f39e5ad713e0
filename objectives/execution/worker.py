"""Main module of a term's process: ``python -m objectives.execution.worker FD``, started by `TermProcess`."""

from __future__ import annotations

import os
import sys
from functools import partial
from multiprocessing.connection import Connection

from objectives.errors import ObjectiveError
from objectives.execution.messages import receive, send
from objectives.execution.respond import end_with_parent, load_term, respond


def serve(connection: Connection) -> None:
    """Load the term named by the first message, then run calls until the connection is closed."""
    module, name = receive(connection)
    try:
        term = load_term(module, name)
    except ObjectiveError as error:
        send(connection, (False, error))
        return
    send(connection, (True, None))
    while True:
        doing, fields, arguments = receive(connection)
        respond(term, doing, fields, arguments, partial(send, connection))


if __name__ == "__main__":
    end_with_parent()
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, OSError):  # The run has ended and waits for this process, so exit without cleanup.
        sys.stdout.flush()
        os._exit(0)
