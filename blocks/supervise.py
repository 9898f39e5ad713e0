"""Run a command that ends with whoever started it, even when that one is killed with -9.

`python supervise.py [--grace=SECONDS] [--children-first] COMMAND ...`: the starter holds the other end of standard
input; the kernel closes it when the starter is gone, however it went. What the command started in turn ends with it,
too; with `--children-first` before it, for a command that would not leave them the time. Kept free of imports of this
project, so that it starts in milliseconds.
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
PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    """Returns the status of the command."""
    grace_s = float(arguments.pop(0).removeprefix(GRACE)) if arguments[0].startswith(GRACE) else 15.0
    children_first = arguments[0] == CHILDREN_FIRST and bool(arguments.pop(0))
    if sys.platform == "linux":
        # Whatever the command leaves behind becomes a child of this process, which can then see it and wait for it.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A group of its own, so that what it starts in turn is stopped with it.
    child = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)

    deadlines: list[float] = []

    def stop(*_: object) -> None:
        if not deadlines:  # a second signal stops a run at once, with the step under way
            deadlines.append(time.monotonic() + grace_s)
            _signal_group(child.pid, signal.SIGTERM)

    def stop_when_starter_ends() -> None:
        os.read(0, 1)
        if children_first:
            _end_children(child.pid, time.monotonic() + grace_s)
        stop()
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            _signal_group(child.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=stop_when_starter_ends, daemon=True).start()
    status = child.wait()
    stop()
    _wait_for_rest(child.pid, deadlines[0])
    return status


def _end_children(pid: int, deadline: float) -> None:
    """Have the children of a process end, each asked once, and wait for them until the deadline."""
    for each in _children(pid):
        _signal(each, signal.SIGTERM)
    while _children(pid) and time.monotonic() < deadline:
        time.sleep(0.05)


def _wait_for_rest(group: int, deadline: float) -> None:
    """Wait for what the command left behind, and kill it after the deadline."""
    while _has_children():
        if time.monotonic() > deadline:
            _signal_group(group, signal.SIGKILL)
            for pid in _children(os.getpid()):
                _signal(pid, signal.SIGKILL)
        time.sleep(0.02)


def _has_children() -> bool:
    """Whether anything that the command left is alive; what has ended is forgotten."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return False
    return True


def _children(pid: int) -> list[int]:
    """Those of all its threads; none where the system does not tell, or it has ended."""
    found: list[int] = []
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(each) for each in path.read_text().split()]
    return found


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
