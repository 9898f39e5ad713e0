"""Failures of the Tinker service as one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tinker
from tinker import types

from blocks.errors import ServiceError, ServiceLostError, TinkerFlowsError


@contextmanager
def service_errors(doing: str) -> Iterator[None]:
    """Turn what the SDK raises while `doing` something into a `ServiceError` that says so.

    What the service puts down to itself, or to the way there, is a `ServiceLostError`.

    >>> with service_errors("save a checkpoint"):
    ...     raise tinker.TinkerError("no space left on device")
    Traceback (most recent call last):
    ...
    blocks.errors.ServiceError: The Tinker service could not save a checkpoint: no space left on device. ...
    """
    try:
        yield
    except TinkerFlowsError:
        raise
    except (tinker.TinkerError, ValueError) as error:
        reason = " ".join(str(error).split()).partition(" for self.request_id")[0].rstrip(".")
        raise (ServiceLostError if _can_pass(error) else ServiceError)(
            f"The Tinker service could not {doing}: {reason}. "
            "Mend that and start the same command again; it resumes from the last checkpoint."
        ) from error


def _can_pass(error: Exception) -> bool:
    if isinstance(error, tinker.RequestFailedError):
        return error.category is not types.RequestErrorCategory.User
    return isinstance(error, tinker.APIConnectionError | tinker.InternalServerError | tinker.RateLimitError)
