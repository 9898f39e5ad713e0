"""A run's place at its Tinker service, where the Prefect server limits how many runs may be there at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

import httpx
from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.logging import get_run_logger

# What Prefect's client raises of a server that is down, and of an answer that is not a server's.
_PASSING = (httpx.HTTPError, PrefectException, RuntimeError, ValueError)


def limit_name(service_url: str) -> str:
    """The global concurrency limit of a service.

    >>> limit_name("https://tinker.example.com/services/prod")
    'tinker:tinker.example.com'
    """
    return f"tinker:{urlsplit(service_url).netloc}"


@contextmanager
def slot_at(service_url: str) -> Iterator[None]:
    """Hold one slot of a service's limit, waiting for it; where there is no limit, or no server, there is no wait.

    A slot costs some 50 ms, so that it is taken when a run opens and never for a step.
    """
    slot = ExitStack()
    name = limit_name(service_url)
    with suppress(*_PASSING):
        if FlowRunContext.get() and _is_limited(name):
            get_run_logger().info("The run takes a slot of %s, or waits for one.", name)
            slot.enter_context(concurrency(name, raise_on_lease_renewal_failure=False))
    try:
        yield
    finally:
        with suppress(*_PASSING):  # a slot that is not given back lapses
            slot.close()


def _is_limited(name: str) -> bool:
    with get_client(sync_client=True) as client:
        try:
            return client.read_global_concurrency_limit_by_name(name).active
        except ObjectNotFound:
            return False
