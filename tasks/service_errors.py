"""Failures of the Tinker service as one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import tinker
from tinker import types

from blocks.errors import NotFiniteError, PoisonedError, ServiceError, ServiceLostError, TinkerFlowsError

# What the local engine refuses; other services answer with the numbers as they are.
_POISONED = re.compile(r"\bloss is -?(nan|inf)\b")
_NOT_FINITE = re.compile(r"\bnot finite\b")


@contextmanager
def service_errors(doing: str) -> Iterator[None]:
    """Turn what the SDK raises while `doing` something into a `ServiceError` that says so.

    What the service puts down to itself, or to the way there, is a `ServiceLostError`; a number that is not finite is a
    `NotFiniteError`.

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
        kind = _kind(error, reason)
        # What becomes of a number that is not finite, a guard says.
        remedy = " Mend that and start the same command again; it resumes from the last checkpoint."
        said = f"The Tinker service could not {doing}: {reason}."
        raise kind(said if issubclass(kind, NotFiniteError) else said + remedy) from error


def _kind(error: Exception, reason: str) -> type[ServiceError]:
    if _can_pass(error):
        return ServiceLostError
    if _POISONED.search(reason):
        return PoisonedError
    return NotFiniteError if _NOT_FINITE.search(reason) else ServiceError


def _can_pass(error: Exception) -> bool:
    if isinstance(error, tinker.RequestFailedError):
        return error.category is not types.RequestErrorCategory.User
    # An answer that is not the service's own is that of a proxy on the way.
    is_foreign = isinstance(error, tinker.APIResponseValidationError | json.JSONDecodeError)
    return is_foreign or isinstance(
        error, tinker.APIConnectionError | tinker.InternalServerError | tinker.RateLimitError
    )
