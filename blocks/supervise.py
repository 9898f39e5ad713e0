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
    # Its own session: a Ctrl-C in the terminal reaches the starter alone, which then stops this in good order.
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def stop(*_: object) -> None:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)

    def stop_when_starter_ends() -> None:
        os.read(0, 1)
        stop()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=stop_when_starter_ends, daemon=True).start()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
