"""What a Prefect server gets from this project: its automations, and all of prefect.yaml, by one process.

`python -m deployments.apply`, where PREFECT_API_URL names the server. It may start before the server has the work pool.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

# What all flows import takes seconds, in which the server starts.
import flows.command_line
import flows.train  # noqa: F401
from deployments.automations import install_all
from deployments.pool import wait_for_pool

FILE = Path(__file__).with_name("prefect.yaml")

if __name__ == "__main__":
    wait_for_pool(os.environ["PREFECT_API_URL"].removesuffix("/api"))
    install_all()
    # As `python -m prefect` does it, whose imports are here already.
    sys.argv = ["prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(FILE)]
    runpy.run_module("prefect", run_name="__main__")
