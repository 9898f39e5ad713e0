"""Who writes a run's record: told to whoever is refused, and known to be gone where that can be seen."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from prefect.runtime import flow_run

from blocks.errors import StorageError


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a run's directory.

    Attributes:
        token: its own, drawn at random for each time it takes hold.
        pid, host: where it runs.
        flow_run: the Prefect flow run that it works for; empty outside of one.
        since: when it took hold, UTC.
        machine: the boot and the pid namespace that `pid` counts in; empty where the system does not tell.
        started: when the process started, in clock ticks since that boot.
    """

    token: str
    pid: int
    host: str
    flow_run: str
    since: str
    machine: str
    started: str

    def __str__(self) -> str:
        run = f", flow run {self.flow_run}" if self.flow_run else ""
        return f"process {self.pid} on {self.host}{run}, since {self.since} UTC"

    def is_gone(self) -> bool:
        """True where it can be seen that the process has ended: on the machine it ran on, before a reboot."""
        return bool(self.machine) and self.machine == _machine() and self.started != _started(self.pid)


def this_process() -> Holder:
    """This process, as it takes hold now."""
    pid = os.getpid()
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
    host, run = socket.gethostname(), flow_run.get_id() or ""
    return Holder(uuid.uuid4().hex, pid, host, run, now, _machine(), _started(pid))


def refusal(location: str, holder: Holder | str) -> StorageError:
    """The sentence for the second writer of a run."""
    return StorageError(
        f"The run in {location} is being written by {holder}: wait for it, stop it, or choose another run_name."
    )


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Empty for a process that is not there. A pid is used again, and then with another start."""
    try:
        # The name in brackets may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
