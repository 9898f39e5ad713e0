"""Failing services: a one-sentence error, and a run that resumes from its last checkpoint."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from engine_process import EngineProcess, running_engine
from forked_program import ForkedProgram, start_program
from mlflow import MlflowClient
from prefect.settings import PREFECT_API_URL, temporary_settings
from s3_server import ACCESS_KEY, SECRET_KEY, running_s3
from sft_config import sft_fields

from blocks import RunStorage
from blocks.errors import ServiceError, StorageError
from blocks.files import lease
from blocks.servers.processes import free_port
from flows.config.train import SftConfig
from flows.monitoring.progress import step_callback
from flows.runs.cli import main
from flows.runs.result import TrainResult
from flows.sft import sft

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")


def rejection(tmp_path: Path, fields: Mapping[str, object]) -> str:
    """Return the one-sentence error of the command line."""
    config = tmp_path / "sft.yaml"
    config.write_text(yaml.safe_dump(fields))
    with pytest.raises(SystemExit) as exit_info:
        main("flows.sft:sft", "flows.config.train:SftConfig", None, argv=["--config", str(config)])
    message = str(exit_info.value)
    assert message.startswith("error: ")
    assert "\n" not in message
    return message


def test_wrong_key(tmp_path: Path, mlflow_uri: str) -> None:
    with running_engine(tmp_path / "engine", environment={"TINKER_ENGINE_API_KEY": "tml-right"}) as engine:
        message = rejection(tmp_path, sft_fields(tmp_path, "key", mlflow_uri, engine.url))
    assert "rejected the API key" in message
    assert "TINKER_API_KEY" in message


def test_unreachable_service(tmp_path: Path, mlflow_uri: str) -> None:
    message = rejection(tmp_path, sft_fields(tmp_path, "absent", mlflow_uri, "http://127.0.0.1:9"))
    assert "http://127.0.0.1:9" in message
    assert "base_url" in message


def test_invalid_prefect_server(tmp_path: Path, mlflow_uri: str) -> None:
    """A captive portal responds to every request with a web page."""

    class Portal(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = b"<html>Welcome"
            self.send_response(200)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Portal) as portal:
        threading.Thread(target=portal.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{portal.server_port}/api"
        with temporary_settings({PREFECT_API_URL: url}):
            message = rejection(tmp_path, sft_fields(tmp_path, "portal", mlflow_uri))
        portal.shutdown()
    assert f"The Prefect server at {url} could not be used" in message
    assert "PREFECT_API_URL" in message


def test_full_disk_while_checkpointing(tmp_path: Path, mlflow_uri: str, engine: EngineProcess) -> None:
    """A file size limit of the engine simulates a full disk."""
    fields = sft_fields(tmp_path, "full", mlflow_uri, engine.url) | {"num_steps": 4, "max_restarts": 0}
    pid = engine.process.pid
    saved = tmp_path / "runs" / "full" / "checkpoints.jsonl"

    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (2_000, resource.RLIM_INFINITY))
    try:
        message = rejection(tmp_path, fields)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    assert "could not save the checkpoint before step 2" in message
    assert "File too large" in message
    assert not saved.exists()

    assert sft(SftConfig.model_validate(fields)).num_steps == 4
    assert [json.loads(line)["batch"] for line in saved.read_text().splitlines()] == [2, 4]


def test_two_runs_at_once(tmp_path: Path, mlflow_uri: str, engine_url: str, prefect_server: str) -> None:
    """The second run is rejected, and the first one is not disturbed."""
    config = SftConfig.model_validate(sft_fields(tmp_path, "twice", mlflow_uri, engine_url))
    storage = RunStorage.model_validate({"url": config.storage})
    with storage.run_directory("twice"), pytest.raises(StorageError, match=r"being written by .*another run_name"):
        sft(config)
    fields = sft_fields(tmp_path, "beside", mlflow_uri, engine_url)
    path = tmp_path / "beside.yaml"
    path.write_text(yaml.safe_dump(fields))
    environment = {**os.environ, "PREFECT_API_URL": prefect_server}
    beside = start_program(["-m", "flows.sft", "--config", str(path)], environment, tmp_path / "beside.log")
    result = sft(config)
    assert beside.wait(240) == 0, beside.output()
    client = MlflowClient(mlflow_uri)
    (other,) = client.search_runs([result.experiment_id], "attributes.run_name = 'beside'")
    assert other.data.metrics["loss/total"] == result.metrics["loss/total"]


def test_record_in_s3(tmp_path: Path, mlflow_uri: str, engine_url: str, prefect_server: str) -> None:
    """Run with its record in a bucket, whose server is killed and restarted during the run."""
    with running_s3(tmp_path / "s3") as s3:
        secrets = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY, "endpoint_url": s3.endpoint_url}
        storage = RunStorage.model_validate({"url": f"s3://{s3.bucket}/runs", **secrets})
        storage.save("flow-test", overwrite=True)
        fields = sft_fields(tmp_path, "bucket", mlflow_uri, engine_url) | {"storage": "block:flow-test", "num_steps": 4}
        watched = storage.run_directory("bucket")

        def restart() -> None:
            while not watched.read_bytes("config.json"):
                time.sleep(0.05)
            s3.kill()
            time.sleep(3)
            s3.restart()

        with ThreadPoolExecutor(max_workers=1) as pool:
            restarting = pool.submit(restart)
            result = sft(SftConfig.model_validate(fields))
            restarting.result()
        assert result.directory == f"s3://{s3.bucket}/runs/bucket"
        with storage.run_directory("bucket") as directory:
            lines = (directory.read_bytes("checkpoints.jsonl") or b"").splitlines()
            assert [json.loads(line)["batch"] for line in lines] == [2, 4]
            assert b"Negative log-likelihood" in (directory.read_bytes("report.html") or b"")
        assert sft(SftConfig.model_validate(fields)).resumed_from == 4


_SHORT_LEASE = """
from blocks.files import lease
lease.LEASE_S = 3.0
from flows.runs.cli import main
main("flows.sft:sft", "flows.config.train:SftConfig", None)
"""


def is_stopped(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def stop_outside_transactions(process: ForkedProgram, mlflow_uri: str) -> None:
    """Suspend a process at a moment at which it does not lock MLflow's database, which others could not write then."""
    while True:
        process.send_signal(signal.SIGSTOP)
        assert process.poll() is None, process.output()
        while not all(map(is_stopped, Path(f"/proc/{process.pid}/task").iterdir())):
            time.sleep(0.01)
        with closing(sqlite3.connect(mlflow_uri.removeprefix("sqlite:///"), timeout=0.5)) as database:
            try:
                database.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                process.send_signal(signal.SIGCONT)
                time.sleep(0.05)
            else:
                return


def test_suspended_run_that_was_taken_over(
    tmp_path: Path, mlflow_uri: str, engine_url: str, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops in one sentence when it continues, and neither logs to the MLflow run nor ends it."""
    monkeypatch.setattr(lease, "LEASE_S", 3.0)
    with running_s3(tmp_path / "s3") as s3:
        secrets = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY, "endpoint_url": s3.endpoint_url}
        storage = RunStorage.model_validate({"url": f"s3://{s3.bucket}/runs", **secrets})
        storage.save("taken-over", overwrite=True)
        fields = sft_fields(tmp_path, "frozen", mlflow_uri, engine_url) | {"storage": "block:taken-over"}
        fields |= {"num_steps": 40, "eval_every": 0, "objective": {}}
        (tmp_path / "frozen.yaml").write_text(yaml.safe_dump(fields))
        (tmp_path / "frozen.py").write_text(_SHORT_LEASE)
        command = [str(tmp_path / "frozen.py"), "--config", str(tmp_path / "frozen.yaml")]
        environment = {**os.environ, "PREFECT_API_URL": prefect_server}
        watched = storage.run_directory("frozen")
        first = start_program(command, environment, tmp_path / "frozen.log")
        while not watched.read_bytes("checkpoints.jsonl"):
            assert first.poll() is None, first.output()
            time.sleep(0.05)
        stop_outside_transactions(first, mlflow_uri)
        started: list[int] = []

        def go_on(step: int, metrics: Mapping[str, float]) -> str:
            started.append(step)
            if len(started) == 5:
                first.send_signal(signal.SIGCONT)
            if len(started) == 10:
                statuses.append(first.wait(60))
            return ""

        statuses: list[int] = []
        try:
            with step_callback(go_on):
                result = sft(SftConfig.model_validate(fields))
        finally:
            first.kill()  # without effect on a process that has ended
        assert statuses == [1]
        assert f"is being written by process {os.getpid()}" in first.output().splitlines()[-1]
        assert result.num_steps == 40
        client = MlflowClient(mlflow_uri)
        run = client.get_run(result.mlflow_run_id)
        assert run.info.status == "FINISHED"
        twice = set[int]()
        for key in (key for key in run.data.metrics if not key.startswith("cost/")):  # repeated steps cost again
            counts = Counter(point.step for point in client.get_metric_history(result.mlflow_run_id, key))
            twice |= {step for step, count in counts.items() if count > 1}
            assert set(counts.values()) <= {1, 2}, key
        # Only the step in whose write the process was suspended may be stored twice; readers use the newest value.
        assert len(twice) <= 1


def test_deleted_directory_of_a_living_run(
    tmp_path: Path, mlflow_uri: str, engine_url: str, prefect_server: str
) -> None:
    """The run stops in one sentence; a second one of the name has the directory to itself."""
    fields = sft_fields(tmp_path, "removed", mlflow_uri, engine_url) | {"eval_every": 0, "objective": {}}
    config = SftConfig.model_validate(fields | {"num_steps": 6})
    folder = tmp_path / "runs" / "removed"

    def remove(step: int, metrics: Mapping[str, float]) -> str:
        if step == 2:
            shutil.rmtree(folder)
        return ""

    with step_callback(remove), pytest.raises(StorageError, match="was removed or replaced while this process"):
        sft(config)
    assert not folder.exists()
    assert sft(config).num_steps == 6


def kill_engine_after(saved: Path, home: Path) -> threading.Thread:
    """Kill the engine of a run once its first checkpoint is recorded."""

    def kill() -> None:
        while not saved.exists():
            time.sleep(0.05)
        subprocess.run(["pkill", "-9", "-f", f"engine.*--state {home}"], check=True)

    killer = threading.Thread(target=kill)
    killer.start()
    return killer


@pytest.mark.slow
def test_local_engine_killed_during_a_run(tmp_path: Path, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run resumes by itself, even with `resume: never`, and logs each step once."""
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    changes = {"num_steps": 20, "checkpoint_every": 3, "eval_every": 0, "resume": "never"}
    fields = sft_fields(tmp_path, "dies", mlflow_uri) | changes
    killer = kill_engine_after(tmp_path / "runs" / "dies" / "checkpoints.jsonl", tmp_path / "home")
    result = sft(SftConfig.model_validate(fields))
    killer.join()
    assert result.resumed_from > 0
    client = MlflowClient(mlflow_uri)
    tags = client.get_run(result.mlflow_run_id).data.tags
    assert "The local engine exited during the run" in tags["tinker_flows.restart.1"]
    steps = [point.step for point in client.get_metric_history(result.mlflow_run_id, "loss/total")]
    assert sorted(steps) == list(range(20))


@pytest.mark.slow
def test_shared_engine_killed_and_restarted(tmp_path: Path, mlflow_uri: str) -> None:
    """The run waits for the engine, resumes from its last checkpoint and logs each step once."""
    port = ["--port", str(free_port())]
    saved = tmp_path / "runs" / "again" / "checkpoints.jsonl"
    results: list[TrainResult] = []
    with running_engine(tmp_path / "engine", arguments=port) as engine:
        fields = sft_fields(tmp_path, "again", mlflow_uri, engine.url) | {"num_steps": 30, "checkpoint_every": 3}
        config = SftConfig.model_validate(fields | {"eval_every": 0})
        context = copy_context()  # keeps the settings of the Prefect server
        run = threading.Thread(target=context.run, args=(lambda: results.append(sft(config)),))
        run.start()
        while not saved.exists():
            time.sleep(0.05)
        engine.process.kill()
    with running_engine(tmp_path / "engine", arguments=port):
        run.join()
    (result,) = results
    assert result.resumed_from > 0
    client = MlflowClient(mlflow_uri)
    assert "restarted" in client.get_run(result.mlflow_run_id).data.tags["tinker_flows.restart.1"]
    steps = [point.step for point in client.get_metric_history(result.mlflow_run_id, "loss/total")]
    assert sorted(steps) == list(range(30))


@pytest.mark.slow
def test_local_engine_killed_without_restarts(tmp_path: Path, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends with a one-sentence error and resumes when it is started again."""
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    fields = sft_fields(tmp_path, "ends", mlflow_uri) | {"num_steps": 30, "checkpoint_every": 1, "max_restarts": 0}
    killer = kill_engine_after(tmp_path / "runs" / "ends" / "checkpoints.jsonl", tmp_path / "home")
    with pytest.raises(ServiceError, match=r"local engine exited during the run.*log:"):
        sft(SftConfig.model_validate(fields))
    killer.join()
    assert sft(SftConfig.model_validate(fields)).resumed_from > 0
