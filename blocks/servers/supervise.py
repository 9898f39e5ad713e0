"""Supervisor that stops a command and its descendants when the process that started it ends, even by kill -9.

`python supervise.py [--grace=SECONDS] [--children-first] [--restarts=NUMBER] COMMAND ...`

The parent process holds the other end of standard input, which the kernel closes when the parent ends. When the parent
or the command ends, or the supervisor gets SIGTERM, it stops what is left: the command's process group gets SIGTERM,
and after `--grace` seconds (15 by default) the group and, on Linux, all other descendants get SIGKILL.
`--children-first` is for a command that would not give its children time to exit: when the parent ends, they get
SIGTERM and the grace time first, and the command then gets a grace time of its own. `--restarts` is how often the
command is started again at most after a signal has killed it; what it left running is killed first. On Linux, the
command also gets SIGTERM if the supervisor itself is killed. This module imports nothing of the project, so that it
starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

GRACE = "--grace="
CHILDREN_FIRST = "--children-first"
RESTARTS = "--restarts="
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    grace_s = float(arguments.pop(0).removeprefix(GRACE)) if arguments[0].startswith(GRACE) else 15.0
    children_first = arguments[0] == CHILDREN_FIRST and bool(arguments.pop(0))
    num_restarts = int(arguments.pop(0).removeprefix(RESTARTS)) if arguments[0].startswith(RESTARTS) else 0
    if sys.platform == "linux":
        # Orphaned descendants of the command become children of this process, which can then find and reap them.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = _start(arguments)
    deadlines: list[float] = []

    def stop(*_: object) -> None:
        if not deadlines:  # send SIGTERM only once: a second one makes a run abort its current step
            deadlines.append(time.monotonic() + grace_s)
            _signal_group(child.pid, signal.SIGTERM)
            killer = threading.Timer(grace_s, _signal_group, (child.pid, signal.SIGKILL))
            killer.daemon = True
            killer.start()

    def stop_when_parent_ends() -> None:
        os.read(0, 1)
        if children_first:
            _stop_children(child.pid, time.monotonic() + grace_s)
        stop()

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=stop_when_parent_ends, daemon=True).start()
    status = child.wait()
    while status < 0 and num_restarts and not deadlines:
        num_restarts -= 1
        print(f"{arguments[0]!r} was killed by signal {-status} and is started again.", file=sys.stderr, flush=True)
        _reap_descendants(child.pid, time.monotonic())
        child = _start(arguments)
        if deadlines:  # the signal came after the check above and reached only the killed command
            deadlines.clear()
            stop()
        status = child.wait()
    stop()  # what the command left running
    _reap_descendants(child.pid, deadlines[0])
    return status


def _start(arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start the command in a process group of its own, so that one signal reaches it and its children."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None

    def stop_with_supervisor() -> None:
        if library:
            library.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    return subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True, preexec_fn=stop_with_supervisor
    )


def _stop_children(pid: int, deadline: float) -> None:
    """Send SIGTERM once to each child of a process and wait for them until the deadline."""
    for child in _children(pid):
        _signal(child, signal.SIGTERM)
    while _children(pid) and time.monotonic() < deadline:
        time.sleep(0.05)


def _reap_descendants(group: int, deadline: float) -> None:
    """Wait for the remaining descendants of the command and kill them after the deadline."""
    while _has_children():
        if time.monotonic() > deadline:
            _signal_group(group, signal.SIGKILL)
            for pid in _children(os.getpid()):
                _signal(pid, signal.SIGKILL)
        time.sleep(0.02)


def _has_children() -> bool:
    """Reap the children that have exited; return whether any child is still alive."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return False
    return True


def _children(pid: int) -> list[int]:
    """List the child pids of all threads of a process; empty if the process has ended or /proc is unavailable."""
    pids: list[int] = []
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            pids += [int(child) for child in path.read_text().split()]
    return pids


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
