"""Startup and liveness checks of the services that `tinker-flows up` starts."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from blocks.errors import ServiceError
from blocks.servers.processes import start_error

STARTUP_LIMIT_S = 180.0
# One client for all requests: a new client loads certificates, which takes too long for polling.
CLIENT = httpx.Client(timeout=30)


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """Started service: its URL (of the worker and the deployments, a page of Prefect), its log file and its process."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def request_stop(self) -> None:
        """Ask the service to stop, without waiting for it: it exits when its standard input is closed."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def wait_until_ready(
    services: Sequence[Service],
    checks: Mapping[Service, Callable[[], bool]],
    announce: Callable[[str], object],
    job: Service | None = None,
) -> None:
    """Wait until every check has passed; fail as soon as a service exits.

    Args:
        services: all services that are watched, including `job`.
        checks: checks of the services that have to become ready, without `job`.
        announce: called with a message that names the services that are not ready, each time that their set changes.
        job: one of the services, without a check, that is ready once it has exited with status 0.

    Raises:
        ServiceError: a service exited, or was not ready within `STARTUP_LIMIT_S`.
    """
    deadline = time.monotonic() + STARTUP_LIMIT_S
    pending = dict(checks) | ({job: lambda: job.process.poll() == 0} if job else {})
    announced: set[Service] = set()
    while True:
        pending = {service: check for service, check in pending.items() if not check()}
        for service in services:
            if service.process.poll() is not None and not (service is job and service.process.poll() == 0):
                raise start_error(service.name, service.log)
        if not pending:
            return
        if pending.keys() != announced:
            announce("waiting for " + ", ".join(service.name for service in pending))
            announced = set(pending)
        if time.monotonic() > deadline:
            late = next(iter(pending))
            raise ServiceError(
                f"The local {late.name} was not ready within {STARTUP_LIMIT_S:.0f} s: see its log {late.log}."
            )
        time.sleep(0.1)


def monitor(services: Sequence[Service]) -> None:
    """Block until a service exits on its own.

    Raises:
        ServiceError: a service exited.
    """
    while True:
        for service in services:
            if (status := service.process.poll()) is not None:
                raise ServiceError(
                    f"The local {service.name} exited unexpectedly (status {status}), so all services were stopped: "
                    f"see its log {service.log} and run `tinker-flows up` again."
                )
        time.sleep(0.5)


def is_healthy(url: str) -> bool:
    """Return whether a server responds with a success status."""
    try:
        return CLIENT.get(url, timeout=5).is_success
    except httpx.HTTPError:
        return False
