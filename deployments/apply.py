"""What a Prefect server gets from this project: its automations, and all of prefect.yaml, by one process.

`python -m deployments.apply`, where PREFECT_API_URL names the server and the work pool is there.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from deployments.automations import install_all

FILE = Path(__file__).with_name("prefect.yaml")

if __name__ == "__main__":
    install_all()
    # As `python -m prefect` does it, whose imports are here already.
    sys.argv = ["prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(FILE)]
    runpy.run_module("prefect", run_name="__main__")
