"""MLflow tracking against real SQLite files and a real MLflow server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlflow_process import running_mlflow

from blocks import MLflowTracking
from blocks.errors import ServiceError
from blocks.servers.processes import free_port
from blocks.tracking import RECORD_TAG

PRINT_EXPERIMENT = """
from blocks import MLflowTracking
input("ready\\n")
tracking = MLflowTracking()
print(tracking.experiment_id(tracking.get_client()))
"""


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Project home whose MLflow tables two processes created at the same time."""
    home = tmp_path_factory.mktemp("mlflow-home")
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(
            [sys.executable, "-c", PRINT_EXPERIMENT],
            env={**os.environ, "TINKER_FLOWS_HOME": str(home)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as other,
    ):
        patch.setenv("TINKER_FLOWS_HOME", str(home))
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        print(file=other.stdin, flush=True)
        tracking = MLflowTracking()
        experiment_id = tracking.experiment_id(tracking.get_client())
        assert other.communicate() == (f"{experiment_id}\n", None)
        assert other.returncode == 0
    return home


@pytest.fixture
def tracking(shared_home: Path, monkeypatch: pytest.MonkeyPatch) -> MLflowTracking:
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(shared_home))
    return MLflowTracking()


@pytest.fixture(scope="module")
def server_url(shared_home: Path) -> Iterator[str]:
    """MLflow server on the same tables."""
    with running_mlflow(shared_home) as url:
        yield url


@pytest.mark.process
def test_default_tracking_is_one_experiment_in_the_project_home(tracking: MLflowTracking, shared_home: Path) -> None:
    client = tracking.get_client()
    experiment = client.get_experiment(tracking.experiment_id(client))
    assert experiment.name == "tinker-flows"
    assert experiment.artifact_location == (shared_home / "mlflow-artifacts").as_uri()
    run = client.create_run(experiment.experiment_id)
    client.log_metric(run.info.run_id, "loss/total", 1.5, step=3)
    client.log_text(run.info.run_id, "report", "report.html")
    assert client.get_run(run.info.run_id).data.metrics == {"loss/total": 1.5}
    assert (shared_home / "mlflow-artifacts" / run.info.run_id / "artifacts" / "report.html").read_text() == "report"


@pytest.mark.process
def test_a_deleted_experiment_error_names_the_restore_command(tracking: MLflowTracking) -> None:
    tracking = MLflowTracking(experiment="deleted")
    client = tracking.get_client()
    experiment_id = tracking.experiment_id(client)
    client.delete_experiment(experiment_id)
    with pytest.raises(ServiceError, match=rf"'deleted' at sqlite.* is deleted: .*restore -x {experiment_id}"):
        tracking.get_client()


def test_a_server_stores_metrics_and_reports(server_url: str, shared_home: Path) -> None:
    tracking = MLflowTracking(tracking_uri=server_url, experiment="served")
    client = tracking.get_client()
    run = client.create_run(tracking.experiment_id(client))
    client.log_metric(run.info.run_id, "loss/total", 1.5, step=3)
    client.log_text(run.info.run_id, "report", "report.html")
    assert client.get_run(run.info.run_id).data.metrics == {"loss/total": 1.5}
    assert [path.read_text() for path in (shared_home / "artifacts").rglob("report.html")] == ["report"]


@pytest.mark.process
def test_a_duplicate_run_is_deleted(tracking: MLflowTracking) -> None:
    """MLflow's client creates a duplicate when it repeats a request whose response was lost."""
    client = tracking.get_client()
    experiment = tracking.experiment_id(client)
    for _ in range(2):
        client.create_run(experiment, run_name="twice", tags={RECORD_TAG: "a record"})
    run = tracking.find_or_create_run(client, "twice", "a record", {})
    client.log_metric(run.info.run_id, "loss", 1.0, step=0)
    client.create_run(experiment, run_name="twice", tags={RECORD_TAG: "a record"})
    assert tracking.find_or_create_run(client, "twice", "a record", {}).info.run_id == run.info.run_id
    runs = client.search_runs([experiment], "attributes.run_name = 'twice'")
    assert [match.info.run_id for match in runs] == [run.info.run_id]
    other = tracking.find_or_create_run(client, "other", "another record", {"mine": "1"})
    assert other.data.tags["mine"] == "1"


def test_concurrent_runs_share_one_experiment(server_url: str) -> None:
    tracking = MLflowTracking(tracking_uri=server_url)
    client = tracking.get_client()
    for number in range(5):
        shared = MLflowTracking(tracking_uri=server_url, experiment=f"race {number}")
        with ThreadPoolExecutor(4) as pool:
            assert len(set(pool.map(shared.experiment_id, [client] * 4))) == 1


def test_an_unreachable_server_is_named_immediately() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServiceError) as caught:
        MLflowTracking(tracking_uri=url).get_client()
    assert str(caught.value) == (
        f"The MLflow server at {url} does not respond ([Errno 111] Connection refused): "
        "check `tracking`, or leave it out for a local SQLite file."
    )


def test_a_driver_that_is_not_installed_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLAlchemy takes a URL without a driver for psycopg2."""
    with pytest.raises(ServiceError, match=r"No module named 'psycopg2'\): start its URL with postgresql\+psycopg://"):
        MLflowTracking(tracking_uri="postgresql://host/mlflow").get_client()
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ServiceError, match=r"install it with pip install 'tinker-flows\[postgres\]'"):
        MLflowTracking(tracking_uri="postgresql+psycopg://host/mlflow").get_client()


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("foo://x", "unsupported URI 'foo://x'"),
        ("./mlruns", "maintenance mode"),
        ("sqlite:///{folder}", "unable to open database file|Is a directory"),
        ("sqlite:///{folder}/file/mlflow.db", "File exists|Not a directory"),
        ("sqlite:///{folder}/file", "file is not a database"),
    ],
)
def test_an_invalid_tracking_uri_is_named_immediately(tmp_path: Path, uri: str, why: str) -> None:
    (tmp_path / "file").write_bytes(b"no database" * 100)
    uri = uri.format(folder=tmp_path)
    with pytest.raises(
        ServiceError, match=rf"The MLflow (server at|database) {uri} could not be used \(.*({why}).*\): check"
    ):
        MLflowTracking(tracking_uri=uri).get_client()


@pytest.mark.process
@pytest.mark.parametrize(
    "module",
    [
        "flows.runs.cli",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("tasks.training.tracking.metrics", "deployments.status")
        ),
    ],
)
def test_mlflow_changes_no_environment_variable_in_a_thread(module: str) -> None:
    """Its telemetry would; MLflow disables that by itself where tests or CI run, so their variables are left out."""
    program = f"import {module}, mlflow, os; print(os.environ.get('_MLFLOW_TELEMETRY_SESSION_ID'))"
    env = {name: os.environ[name] for name in ("PATH", "HOME")}
    shown = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert shown.stdout == "None\n"
