"""Errors of requests to the Prefect server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from blocks.errors import ServiceError, TinkerFlowsError, reason

LOGIN_REMEDY = "set PREFECT_API_AUTH_STRING to USER:PASSWORD of the server (`tinker-flows up` prints it)"


def check_prefect_url() -> None:
    """Check that PREFECT_API_URL has no user name and no password, which Prefect would write into its logs.

    Raises:
        ConfigError: PREFECT_API_URL has one of them.
    """
    from prefect.settings import PREFECT_API_URL

    from blocks.urls import check_no_credentials

    fix = "remove it and set PREFECT_API_AUTH_STRING to USER:PASSWORD"
    check_no_credentials(PREFECT_API_URL.value() or "", "PREFECT_API_URL", fix)


@contextmanager
def prefect_failures(remedy: str) -> Iterator[None]:
    """Convert failures of Prefect's client into a `ServiceError` that names the server and how to fix the problem.

    Args:
        remedy: ends the error message, unless the server has rejected the login.
    """
    import httpx
    from prefect.exceptions import ObjectNotFound, PrefectException
    from prefect.settings import PREFECT_API_URL

    from blocks.urls import hide_credentials

    try:
        yield
    except TinkerFlowsError:
        raise
    except (httpx.HTTPError, PrefectException, RuntimeError, ValueError) as error:
        url = hide_credentials(str(PREFECT_API_URL.value()))
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.UNAUTHORIZED:
            raise ServiceError(f"The Prefect server at {url} rejects the login (401): {LOGIN_REMEDY}.") from error
        if isinstance(error, ObjectNotFound):
            raise ServiceError(
                f"The Prefect server at {url} no longer has the flow run, or another object of this command, because "
                "it was deleted: run the same command again."
            ) from error
        raise ServiceError(f"The Prefect server at {url} could not be used ({reason(error)}): {remedy}.") from error
