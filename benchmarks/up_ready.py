"""Startup time of `tinker-flows up`: until every service responds and every deployment exists.

The project home has been used before and the engine serves the tiny model. The peer is the time until a
Prefect server alone is healthy.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

from benchmarks.rows import Row
from benchmarks.scratch import scratch_home
from blocks.servers.processes import local_prefect_server

BUDGET_S = 30.0
COMMAND = [sys.executable, "-m", "deployments.command_line", "up", "--engine-model", "tiny"]


def measure(*, repetitions: int = 3) -> list[Row]:
    """Return one row: seconds until ready, with the seconds of the shutdown in the note."""
    ready, down, peer = [], [], []
    with scratch_home():
        _up_and_down()  # creates the database tables
        for _ in range(repetitions):
            up_s, down_s = _up_and_down()
            ready.append(up_s)
            down.append(down_s)
            peer.append(_prefect_server())
    verdict = "holds" if max(ready) <= BUDGET_S else "EXCEEDED"
    return [
        Row(
            "up_ready: engine, Prefect, MLflow, worker and deployments",
            "s",
            ready,
            peer,
            peer_name="a Prefect server alone",
            note=f"budget {BUDGET_S:g} s: {verdict}; shutdown within {max(down):.1f} s",
        )
    ]


def _up_and_down() -> tuple[float, float]:
    """Start and stop `tinker-flows up`; return the seconds until it is ready, and from SIGTERM until it exits."""
    started = perf_counter()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        COMMAND, cwd=Path(__file__).parents[1], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if re.match(r"Ready in ", line):
                break
        else:
            raise RuntimeError(f"`tinker-flows up` did not become ready: {output}")
        ready_s = perf_counter() - started
        process.send_signal(signal.SIGTERM)
        started = perf_counter()
        process.stdout.read()
    return ready_s, perf_counter() - started


def _prefect_server() -> float:
    with ExitStack() as stack:
        started = perf_counter()
        stack.enter_context(local_prefect_server())
        return perf_counter() - started
