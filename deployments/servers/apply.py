"""Set up a Prefect server for this project: create every deployment of prefect.yaml, then the automations.

Run as `python -m deployments.servers.apply` with PREFECT_API_URL set. The server and its work pool may still be
starting.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from blocks.garbage_collection import no_collections

# Import the flows before waiting: the imports take seconds, during which the server starts.
with no_collections():
    import flows.runs.cli
    import flows.training.trainer  # noqa: F401
    from deployments.servers.automations import install_all
    from deployments.servers.work_pool import prefect_api, wait_for_pool

FILE = Path(__file__).parents[1] / "prefect.yaml"

if __name__ == "__main__":
    wait_for_pool(prefect_api(os.environ["PREFECT_API_URL"], os.environ.get("PREFECT_API_AUTH_STRING", "")))
    # Equivalent to `python -m prefect deploy ...`, in this process, which has imported the flows already.
    sys.argv = ["prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(FILE)]
    try:
        runpy.run_module("prefect", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        install_all()  # after the deployments, because the automation of evaluations needs one
