"""A Dask cluster on this machine for one run: ``python -m objectives.execution.local_dask FD``, started by `LocalDask`.

Started by the run itself, Dask's workers would run the user's program a second time.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from objectives.execution.cluster import num_workers
from objectives.execution.messages import send


def serve(connection: Connection) -> None:
    """Run the cluster until the other side is gone."""
    import dask.config  # pyright: ignore[reportMissingImports]
    import distributed  # pyright: ignore[reportMissingImports]

    folder = tempfile.mkdtemp(prefix="dask-")
    # A task that its worker died of is tried once more: it may have waited there behind the one that was to blame.
    dask.config.set({"temporary-directory": folder, "distributed.scheduler.allowed-failures": 1})
    # Whoever can connect can run anything, and on this machine that is every user of it.
    security: Any = distributed.Security.temporary()
    cluster = distributed.LocalCluster(
        n_workers=num_workers(),
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address=None,  # pyright: ignore[reportArgumentType]  # its annotation lacks it
        security=security,
        silence_logs=logging.ERROR,
    )
    try:
        send(connection, (cluster.scheduler_address, security))
        with suppress(EOFError, OSError):
            connection.recv_bytes()
    finally:  # there is nothing to be taken down in order, and a busy worker would not be
        for each in multiprocessing.active_children():
            each.kill()
        shutil.rmtree(folder, ignore_errors=True)
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
