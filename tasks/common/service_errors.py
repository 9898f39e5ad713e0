"""Conversion of the SDK's exceptions to `ServiceError`, and the transient exceptions of the Prefect client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import httpx
import tinker
from prefect.exceptions import PrefectException
from tinker import types

from blocks.errors import NotFiniteError, PoisonedError, ServiceError, ServiceLostError, TinkerFlowsError

# Transient errors of the Prefect client, such as a server that restarts.
TRANSIENT_ERRORS = (httpx.HTTPError, PrefectException, RuntimeError, ValueError)

# Error messages of the local engine for NaN and infinity; other services return such values instead of an error.
_POISONED = re.compile(r"\bloss is -?(nan|inf)\b|\blogits that are not finite\b")
_NOT_FINITE = re.compile(r"\bnot finite\b")


@contextmanager
def service_errors(doing: str) -> Iterator[None]:
    """Turn errors that the SDK raises while `doing` something into a one-sentence `ServiceError`.

    Failures of the service or the connection become a `ServiceLostError`, and numbers that are not finite a
    `NotFiniteError`.

    >>> with service_errors("save a checkpoint"):
    ...     raise tinker.TinkerError("no space left on device")
    Traceback (most recent call last):
    ...
    blocks.errors.ServiceError: The Tinker service could not save a checkpoint: no space left on device; ...
    """
    try:
        yield
    except TinkerFlowsError:
        raise
    except (tinker.TinkerError, ValueError) as error:
        reason = " ".join(str(error).split()).partition(" for self.request_id")[0].rstrip(".")
        kind = _kind(error, reason)
        message = f"The Tinker service could not {doing}: {reason}"
        if not issubclass(kind, NotFiniteError):  # guards handle numbers that are not finite
            message += "; fix the cause and start the same command again, which resumes from the last checkpoint"
        raise kind(f"{message}.") from error


def _kind(error: Exception, reason: str) -> type[ServiceError]:
    if _is_transient(error):
        return ServiceLostError
    if _POISONED.search(reason):
        return PoisonedError
    return NotFiniteError if _NOT_FINITE.search(reason) else ServiceError


def _is_transient(error: Exception) -> bool:
    if isinstance(error, tinker.RequestFailedError):
        return error.category is not types.RequestErrorCategory.User
    # A response that is not in the service's format comes from a proxy in between, so another attempt may succeed.
    is_foreign = isinstance(error, tinker.APIResponseValidationError | json.JSONDecodeError)
    return is_foreign or isinstance(
        error, tinker.APIConnectionError | tinker.InternalServerError | tinker.RateLimitError
    )


T = TypeVar("T")


def wait_for_response(pending: tinker.APIFuture[T], doing: str) -> T:
    """Wait for the service's response to a request.

    Args:
        pending: the request.
        doing: action of the request, for error messages.

    Raises:
        ServiceError: the service failed.
    """
    with service_errors(doing):
        return pending.result()
