"""Run with Prefect and MLflow on PostgreSQL."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import LiteralString

import httpx
import psycopg
import pytest
import yaml
from postgres_server import running_postgres
from sft_config import sft_fields

from blocks.servers.processes import free_port, prefect_server_env


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_on_postgresql(tmp_path: Path, engine_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    with running_postgres() as where:
        connection = psycopg.connect(f"postgresql://{where}/postgres")
        connection.autocommit = True
        connection.execute("CREATE DATABASE prefect")
        connection.execute("CREATE DATABASE mlflow")
        connection.close()
        config = tmp_path / "sft.yaml"
        config.write_text(yaml.safe_dump(sft_fields(tmp_path, "team", "", engine_url)))
        mlflow = f"postgresql+psycopg://{where}/mlflow"  # with a user name, which a config must not contain
        with prefect_server(f"postgresql+asyncpg://{where}/prefect") as api:
            subprocess.run(
                [sys.executable, "-m", "flows.sft", "--config", str(config)],
                env={**os.environ, "PREFECT_API_URL": api, "TINKER_API_KEY": "tml-test", "MLFLOW_TRACKING_URI": mlflow},
                cwd=Path(__file__).parents[3],
                check=True,
            )
        runs = count(f"postgresql://{where}/prefect", "SELECT count(*) FROM flow_run WHERE state_type = 'COMPLETED'")
        assert runs == 1
        steps = count(f"postgresql://{where}/mlflow", "SELECT count(*) FROM metrics WHERE key = 'loss/total'")
        assert steps == 8


@contextmanager
def prefect_server(database: str) -> Iterator[str]:
    port = str(free_port())
    url = f"http://127.0.0.1:{port}/api"
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", port]
    environment = {**os.environ, **prefect_server_env(), "PREFECT_API_DATABASE_CONNECTION_URL": database}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health").is_success:
                    break
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def count(url: str, query: LiteralString) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]
