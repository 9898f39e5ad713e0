"""The time until a whole laptop is ready: from typing `tinker-flows up` to every service answering and all deployed.

In a home that was used before, as on every day but the first, with the tiny model. The peer is one of its parts: a
Prefect server until it is healthy.
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
from blocks.processes import local_prefect_server

BUDGET_S = 30.0
COMMAND = [sys.executable, "-m", "deployments.command_line", "up", "--engine-model", "tiny"]


def measure(*, repetitions: int = 3) -> list[Row]:
    """One row: seconds until ready, and until all of it is down again in the note."""
    ready, down, peer = [], [], []
    with scratch_home():
        _up_and_down()  # makes the tables
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
            note=f"budget {BUDGET_S:g} s: {verdict}; down again within {max(down):.1f} s",
        )
    ]


def _up_and_down() -> tuple[float, float]:
    """Seconds until it says that it is ready, and from SIGTERM to its end."""
    began = perf_counter()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        COMMAND, cwd=Path(__file__).parents[1], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if re.match(r"Ready in ", line):
                break
        else:
            raise RuntimeError(f"tinker-flows up did not come up: {said}")
        ready_s = perf_counter() - began
        process.send_signal(signal.SIGTERM)
        began = perf_counter()
        process.stdout.read()
    return ready_s, perf_counter() - began


def _prefect_server() -> float:
    with ExitStack() as stack:
        began = perf_counter()
        stack.enter_context(local_prefect_server())
        return perf_counter() - began
