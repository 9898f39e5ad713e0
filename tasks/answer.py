"""The service's answer to a request that is under way."""

from __future__ import annotations

from typing import TypeVar

import tinker

from tasks.service_errors import service_errors

T = TypeVar("T")


def wait_for_answer(pending: tinker.APIFuture[T], doing: str) -> T:
    """Wait for the answer to a request that asked the service to be `doing` something.

    Raises:
        ServiceError: the service could not do it.
    """
    with service_errors(doing):
        return pending.result()
