"""Local Dask cluster of one run: ``python -m flows.runs.local_dask FD``, started by `LocalDask`.

The cluster runs in a process of its own. Dask's workers import the main module of their parent; if the run were their
parent, they would run the user's program again. The cluster ends with the run, also if the run is killed.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from blocks.errors import ConfigError
from blocks.terminal import print_notice
from objectives.execution.messages import receive, send
from objectives.execution.process import START_S, start_python

_STOP_S = 20.0


class LocalDask:
    """Local cluster in a process that ends with this one.

    Attributes:
        address: Address of the scheduler.
        security: Keys that are required to connect.
    """

    def __init__(self, num_workers: int) -> None:
        self._process, self._connection = start_python("flows.runs.local_dask")
        try:
            send(self._connection, num_workers)
            if not self._connection.poll(START_S):
                raise ConfigError(f"The local Dask cluster took longer than {START_S:g} s to start: free some memory.")
            self.address, self.security = receive(self._connection)
        except (EOFError, OSError) as error:
            self.close()
            raise ConfigError("The local Dask cluster ended during startup: see its error output.") from error
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """End the cluster and its workers."""
        self._connection.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(connection: Connection) -> None:
    """Run the cluster until the connection is closed."""
    import dask.config  # pyright: ignore[reportMissingImports]
    import distributed  # pyright: ignore[reportMissingImports]

    num_workers = receive(connection)
    folder = tempfile.mkdtemp(prefix="dask-")
    options = {
        "temporary-directory": folder,
        # If a worker dies, retry its tasks once: another task on that worker may have killed it.
        "distributed.scheduler.allowed-failures": 1,
        # Time limit for the restart of a worker, after which the cluster gives the worker up; Dask's default is 15 s.
        "distributed.deploy.lost-worker-timeout": f"{START_S}s",
    }
    dask.config.set(options)
    # Whoever connects can run code, and without keys every user of this machine could connect.
    security: Any = distributed.Security.temporary()
    status = 0
    try:
        cluster = distributed.LocalCluster(
            n_workers=num_workers,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address=None,  # pyright: ignore[reportArgumentType]  # missing in its annotation
            security=security,
            silence_logs=logging.ERROR,
        )
        send(connection, (cluster.scheduler_address, security))
        with suppress(EOFError, OSError):
            connection.recv_bytes()
    except BaseException:  # noqa: BLE001 - the process ends below
        print_notice(traceback.format_exc())
        status = 1
    finally:  # Kill the workers, because a busy worker does not shut down on request.
        for process in multiprocessing.active_children():
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
