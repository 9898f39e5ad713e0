"""Real MLflow server in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from blocks.servers.processes import free_port


@contextmanager
def running_mlflow(folder: Path, store: str = "", pool_size: int | None = None) -> Iterator[str]:
    """Run a server; yields its URL.

    Args:
        folder: folder of the artifacts and the log.
        store: URL of the database; default: ``folder/mlflow.db``.
        pool_size: size of the pool of database connections; None for MLflow's default.
    """
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    command += ["--workers", "1", "--backend-store-uri", store or f"sqlite:///{folder / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    if pool_size is not None:
        env["MLFLOW_SQLALCHEMYSTORE_POOL_SIZE"] = str(pool_size)
    with (
        (folder / "mlflow.log").open("wb") as log,
        subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            while not _is_healthy(f"{url}/health"):
                assert process.poll() is None, (folder / "mlflow.log").read_text()
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.HTTPError:
        return False
