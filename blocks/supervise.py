"""Run a command that ends with whoever started it, even when that one is killed with -9.

`python supervise.py COMMAND ...`: the starter holds the other end of standard input; the kernel closes it when the
starter is gone, however it went. Kept free of imports of this project, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    # A group of its own, so that what it starts in turn is stopped with it.
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)

    def stop(*_: object) -> None:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)

    def stop_when_starter_ends() -> None:
        os.read(0, 1)
        stop()
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=stop_when_starter_ends, daemon=True).start()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
