"""The exceptions of this room: what a user can mend in an objective."""


class ObjectiveError(ValueError):
    """An objective, term or batch that cannot be trained on; the message is one sentence for the user."""


class ExecutionError(ObjectiveError):
    """A term that was not run to its end; a clause, from which the runner makes the sentence."""


class UntraceableError(ObjectiveError):
    """An objective, or a term, that cannot be one pass of the service; a clause that says why."""


class NotFiniteError(ObjectiveError):
    """A value or gradient that is NaN or infinite; the message is one sentence for the user."""
