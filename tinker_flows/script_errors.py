"""Errors of scripts that import `tinker_flows`: one sentence, as on the command line, with the traceback in a file."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from types import TracebackType

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def install() -> None:
    """Shorten the traceback of an uncaught error of this package and of Ctrl-C; the previous hook gets other errors."""
    sys.excepthook = partial(_show, sys.excepthook)


def _show(previous: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught error; the process exits with 1 after an error, as Python does, and with 130 after Ctrl-C."""
    # Imported here, because `import tinker_flows` loads nothing heavy.
    from blocks.errors import ExplainedInterrupt, TinkerFlowsError, traceback_is_requested
    from blocks.terminal import print_notice
    from objectives.errors import ObjectiveError

    if traceback_is_requested() or not isinstance(error, TinkerFlowsError | ObjectiveError | KeyboardInterrupt):
        previous(kind, error, trace)
    elif isinstance(error, KeyboardInterrupt):
        if not isinstance(error, ExplainedInterrupt):
            print_notice("Stopped. Run the same script again to resume a run from its last checkpoint.")
        sys.exit(130)
    else:
        text = "".join(traceback.format_exception(kind, error, trace))
        print_notice(f"{_store(text)}\nerror: {error}")


def _store(text: str) -> str:
    """Write a traceback to a file and return a sentence with its path; return the traceback itself if that fails."""
    from blocks.errors import StorageError
    from blocks.files.local import home

    try:
        path = home() / "logs" / f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    except (OSError, StorageError):
        return text
    return f"The traceback is in {path}; TINKER_FLOWS_TRACEBACK=1 shows it here."
