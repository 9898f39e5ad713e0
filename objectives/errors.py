"""The exceptions of this room: what a user can mend in an objective."""

from pydantic import ValidationError


class ObjectiveError(ValueError):
    """An objective, term or batch that cannot be trained on; the message is one sentence for the user."""


class ExecutionError(ObjectiveError):
    """A term that was not run to its end; a clause, from which the runner makes the sentence."""


class UntraceableError(ObjectiveError):
    """An objective, or a term, that cannot be one pass of the service; a clause that says why."""


class NotFiniteError(ObjectiveError):
    """A value or gradient that is NaN or infinite; the message is one sentence for the user."""


def explain(error: ValidationError) -> str:
    """The first thing a validation found wrong, as a clause: where, what was got, what was expected."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"] if part != "number") or "it"  # "number": a plain weight
    message = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] in ("extra_forbidden", "missing"):
        return f"{where!r}: {message}"
    return f"{where!r} is {first['input']!r}, but {message}"
