"""Local Dask cluster of one run: ``python -m objectives.execution.local_dask FD``, started by `LocalDask`.

The cluster has a separate process, because Dask's workers import the main module of their parent, the user's program.
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
    """Run the cluster until the connection is closed."""
    import dask.config  # pyright: ignore[reportMissingImports]
    import distributed  # pyright: ignore[reportMissingImports]

    folder = tempfile.mkdtemp(prefix="dask-")
    # Retry a task once after its worker died, because another task on this worker may have caused it.
    dask.config.set({"temporary-directory": folder, "distributed.scheduler.allowed-failures": 1})
    # A connection allows arbitrary code, and every user of this machine could connect.
    security: Any = distributed.Security.temporary()
    cluster = distributed.LocalCluster(
        n_workers=num_workers(),
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address=None,  # pyright: ignore[reportArgumentType]  # missing in its annotation
        security=security,
        silence_logs=logging.ERROR,
    )
    try:
        send(connection, (cluster.scheduler_address, security))
        with suppress(EOFError, OSError):
            connection.recv_bytes()
    finally:  # Kill the workers, because a busy worker does not shut down in order.
        for process in multiprocessing.active_children():
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
