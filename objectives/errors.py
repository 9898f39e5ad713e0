"""Exceptions about objectives that a user can fix, and suggestions for misspelled names."""

import os
import sysconfig
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from pydantic import ValidationError

# Folders whose code is not the user's: the standard library, and the callers of terms and of environments.
_ROOT = Path(__file__).parents[1]
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
        *(_ROOT / name for name in ("objectives", "blocks", "tasks", "flows")),
    )
)


class ObjectiveError(ValueError):
    """Invalid objective, term or batch; the message is one sentence for the user."""


class ExecutionError(ObjectiveError):
    """Term that did not run to completion; the message is a clause that the runner completes to a sentence."""


class UntraceableError(ObjectiveError):
    """Objective or term that cannot run in one pass of the service; the message is a clause with the reason."""


class NotFiniteError(ObjectiveError):
    """NaN or infinite value or gradient; the message is one sentence for the user."""


def exit_call(error: SystemExit) -> str:
    """Return the call that raised an error.

    >>> exit_call(SystemExit()), exit_call(SystemExit(3))
    ('sys.exit()', 'sys.exit(3)')
    """
    return f"sys.exit({'' if error.code is None else repr(error.code)})"


def place_in_user_code(error: BaseException) -> str:
    """Return file and line of the innermost frame of an error that is in the user's own code; empty if none is."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", *_LIBRARIES))
        and not {"site-packages", "dist-packages"} & set(Path(frame.filename).parts)
    ]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question about the known name that is closest to a misspelled one; empty if none is close.

    >>> did_you_mean("lerning_rate", ["learning_rate", "seed"])
    "; did you mean 'learning_rate'?"
    """
    matches = get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def explain(error: ValidationError) -> str:
    """Describe the first error of a validation as a clause: field, value and expectation."""
    first = error.errors(include_url=False)[0]
    # "number" is the union tag of a plain weight.
    path = ".".join(str(part) for part in first["loc"] if part != "number")
    where = repr(path) if path else "it"
    message = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] in ("extra_forbidden", "missing"):
        return f"{where}: {message}"
    return f"{where} is {first['input']!r}, but {message}"
