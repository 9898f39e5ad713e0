"""Process that holds the write lock of a run, for the message to a second writer and the check that it has ended."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from prefect.runtime import flow_run

from blocks.errors import LostRunError, StorageError

LOCAL_LOCK = b"process "  # start of the lock file of a local directory


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Process that holds a run's directory.

    Attributes:
        token: random id, new for each acquisition.
        pid, host: process id and host name.
        flow_run: id of the Prefect flow run; empty outside a flow run.
        since: acquisition time, UTC.
        machine: boot id and pid namespace that `pid` belongs to; empty if the operating system does not provide them.
        started: start time of the process, in clock ticks since that boot.
    """

    token: str
    pid: int
    host: str
    flow_run: str
    since: str
    machine: str
    started: str

    def __str__(self) -> str:
        """Describe the process; the lock file of a local directory has this text, which starts with `LOCAL_LOCK`."""
        run = f", flow run {self.flow_run}" if self.flow_run else ""
        return f"process {self.pid} on {self.host}{run}, since {self.since} UTC"

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended.

        False for a process of another machine, boot or pid namespace, because its end cannot be seen from here.
        """
        return bool(self.machine) and self.machine == _machine() and self.started != _start_time(self.pid)


def current_process() -> LockHolder:
    """Describe this process as the holder of a lock acquired now."""
    pid = os.getpid()
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
    host, run = socket.gethostname(), flow_run.get_id() or ""
    return LockHolder(uuid.uuid4().hex, pid, host, run, now, _machine(), _start_time(pid))


def locked_error(location: str, holder: LockHolder | str) -> StorageError:
    """Build the error for a second writer of a run.

    Args:
        holder: the process that writes the run, or words for it if it is not known.
    """
    return StorageError(_locked(location, holder))


def taken_over_error(location: str, holder: LockHolder | str) -> LostRunError:
    """Build the error for a writer from which another process has taken over the run."""
    return LostRunError(_locked(location, holder))


def removed_error(location: str) -> LostRunError:
    """Build the error for a writer whose directory was removed or replaced."""
    return LostRunError(
        f"The run directory {location} was removed or replaced while this process was writing it: this process stops; "
        "start the same command again for a new run."
    )


def _locked(location: str, holder: LockHolder | str) -> str:
    return f"The run in {location} is being written by {holder}: wait for it, stop it, or choose another run_name."


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Return the start time of a process, or an empty string if the process does not exist.

    Pids are reused; the start time tells two processes with the same pid apart.
    """
    try:
        # Field 22 of proc(5) is the 20th after the process name, which may contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
