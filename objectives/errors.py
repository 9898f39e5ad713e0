"""The exceptions of this room: what a user can mend in an objective."""


class ObjectiveError(ValueError):
    """An objective, term or batch that cannot be trained on; the message is one sentence for the user."""
