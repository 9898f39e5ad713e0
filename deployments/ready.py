"""Whether the services that were started answer, and go on to."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.status import Status

from blocks.errors import ServiceError
from blocks.processes import start_error

LIMIT_S = 180.0
# One for all requests: each new one loads certificates first, 30 ms, which is much for what is asked so often.
CLIENT = httpx.Client(timeout=30)


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """A started service: where it will be, what it writes, and its process."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def let_go(self) -> None:
        """Have it end; nobody waits for that here."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def wait_until_ready(
    services: Sequence[Service],
    checks: Mapping[Service, Callable[[], bool]],
    status: Status,
    ending: Service | None = None,
) -> None:
    """Wait until every check holds, as long as no service ends meanwhile.

    Args:
        ending: the one that is ready when it has ended, and well.

    Raises:
        ServiceError: a service ended, or was not ready within `LIMIT_S`.
    """
    deadline = time.monotonic() + LIMIT_S
    waiting = dict(checks) | ({ending: lambda: ending.process.poll() == 0} if ending else {})
    while True:
        waiting = {service: check for service, check in waiting.items() if not check()}
        for each in services:
            if each.process.poll() is not None and not (each is ending and each.process.poll() == 0):
                raise start_error(each.name, each.log)
        if not waiting:
            return
        status.update("waiting for " + ", ".join(each.name for each in waiting))
        if time.monotonic() > deadline:
            late = next(iter(waiting))
            raise ServiceError(f"The local {late.name} was not ready within {LIMIT_S:.0f} s: see its log {late.log}.")
        time.sleep(0.1)


def watch(services: Sequence[Service]) -> None:
    """Stay as long as every service does.

    Raises:
        ServiceError: one ended by itself.
    """
    while True:
        for each in services:
            if (ended := each.process.poll()) is not None:
                raise ServiceError(
                    f"The local {each.name} ended by itself (status {ended}), and all the others with it: look in its "
                    f"log {each.log} and start `tinker-flows up` again."
                )
        time.sleep(0.5)


def answers(url: str) -> bool:
    """Whether a server answers, and well."""
    try:
        return CLIENT.get(url, timeout=5).is_success
    except httpx.HTTPError:
        return False
