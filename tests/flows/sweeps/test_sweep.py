"""Sweeps from space to report, with real trial processes, engine, MLflow and Prefect."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from engine_process import EngineProcess
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
)
from prefect.client.schemas.objects import FlowRun
from saved_weights import saved_weights
from sft_config import sft_fields

from blocks.errors import ConfigError, ServiceError
from blocks.files.local_directory import LocalDirectory
from flows.config.loader import load_config
from flows.config.train import SftConfig
from flows.monitoring.drain import deliver_events
from flows.sft import sft
from flows.sweep import sweep
from flows.sweeps.backends.process import TrialProcess
from flows.sweeps.config import SweepConfig
from flows.sweeps.result import SweepResult
from tasks.sweeps.store import read_trials

ROOT = Path(__file__).parents[3]
RATE, BATCH = "learning_rate", "data.params.common_config.batch_size"

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


def sweep_fields(folder: Path, run_name: str, tracking: str, url: str, **changed: Any) -> dict[str, Any]:
    """Return a sweep with two seeds whose points learn, do not learn, or have no data."""
    base = sft_fields(folder, "base", tracking, url) | {"num_steps": 3, "eval_every": 1}
    base["objective"] = {"regularizers": [{"name": "confidence", "weight": 0.1}]}
    return {
        "run_name": run_name,
        "base": base,
        "space": {RATE: [1e-2, 1e-7], BATCH: [4, 100_000]},
        "seeds": [0, 1],
        "prune": {"rule": "median", "min_trials": 2, "min_steps": 1},
        "concurrency": 2,
    } | changed


@pytest.fixture(scope="module")
def config(folder: Path, engine_url: str, mlflow_uri: str) -> SweepConfig:
    # One trial after the other: a trial is pruned at step 1 only if both seeds of the first point have ended.
    return SweepConfig.model_validate(sweep_fields(folder, "whole", mlflow_uri, engine_url, concurrency=1))


@pytest.fixture(scope="module")
def finished(config: SweepConfig, prefect_server: str) -> SweepResult:
    """Run one sweep for several tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", "tml-test")
        return sweep(config)


def flow_runs_below(result: SweepResult) -> list[FlowRun]:
    deliver_events()
    below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[UUID(result.flow_run_id)]))
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(flow_run_filter=below)


def runs_below(result: SweepResult) -> dict[str, Run]:
    client = MlflowClient(result.tracking_uri)
    below = f"tags.`mlflow.parentRunId` = '{result.mlflow_run_id}'"
    return {run.info.run_name or "": run for run in client.search_runs([result.experiment_id], below)}


def test_trial_statuses(finished: SweepResult) -> None:
    trials = read_trials(LocalDirectory(Path(finished.directory)))
    ends = {(point, seed): trial.status for (point, seed), trial in trials.finished.items()}
    assert ends == {
        **{(1, seed): "completed" for seed in (0, 1)},
        **{(3, seed): "pruned" for seed in (0, 1)},
        **{(point, seed): "failed" for point in (2, 4) for seed in (0, 1)},
    }
    assert "no full batch" in trials.finished[2, 0].reason
    assert trials.finished[3, 0].reason.startswith("Pruned at step 1")
    assert [step for step, _ in trials.finished[1, 0].curve] == [0, 1, 2, 3]
    # The trial was stopped before its last step.
    assert [step for step, _ in trials.finished[3, 1].curve] == [0, 1]
    assert (finished.num_completed, finished.num_pruned, finished.num_failed) == (2, 2, 4)


def test_best_point_learns(finished: SweepResult) -> None:
    trials = read_trials(LocalDirectory(Path(finished.directory)))
    values = [trials.finished[1, seed].value for seed in (0, 1)]
    assert finished.best_point == 1
    assert finished.best_value == pytest.approx(sum(value for value in values if value is not None) / 2)
    assert finished.rows[0][0] == "1"
    assert "±" in finished.rows[0][4]


def test_trials_are_child_runs_in_mlflow(finished: SweepResult) -> None:
    below = runs_below(finished)
    # Trials without data have a failed run or none.
    assert {"whole-001-s0", "whole-001-s1", "whole-003-s0", "whole-003-s1"} <= below.keys()
    assert below["whole-001-s0"].info.status == "FINISHED"
    assert below["whole-003-s0"].info.status == "KILLED"
    assert below["whole-001-s1"].data.params["seed"] == "1"
    parent = MlflowClient(finished.tracking_uri).get_run(finished.mlflow_run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["best/test/nll"] == pytest.approx(finished.best_value)


def test_trials_are_child_flow_runs_in_prefect(finished: SweepResult) -> None:
    states = {run.name: run.state_name for run in flow_runs_below(finished)}
    assert states == {
        **{f"whole-001-s{seed}": "Completed" for seed in (0, 1)},
        **{f"whole-003-s{seed}": "Cancelled" for seed in (0, 1)},
        **{f"whole-00{point}-s{seed}": "Failed" for point in (2, 4) for seed in (0, 1)},
    }


def test_report_is_stored_in_the_directory_mlflow_and_prefect(finished: SweepResult) -> None:
    page = Path(finished.report).read_text()
    assert page.count("<svg") == 3  # Pareto front, map, parallel coordinates
    assert 'href="http' not in page
    assert "no full batch" in page
    client = MlflowClient(finished.tracking_uri)
    names = {artifact.path for artifact in client.list_artifacts(finished.mlflow_run_id)}
    assert {"report.html", "best.yaml", "report"} <= names
    with get_client(sync_client=True) as prefect:
        key = ArtifactFilter(key=ArtifactFilterKey(any_=["sweep-whole"]))
        found = prefect.read_artifacts(artifact_filter=key)
    assert finished.report in str(found[0].data)


def test_best_config_reproduces_its_trial(finished: SweepResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values and seed give the same weights."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    best = load_config(SftConfig, Path(finished.best_config), [])
    assert (best.run_name, best.learning_rate, best.seed) == ("whole-best", 1e-2, 0)
    result = sft(best)
    trial = read_trials(LocalDirectory(Path(finished.directory))).finished[1, 0]
    assert result.metrics["test/nll"] == pytest.approx(trial.value, rel=1e-6)


def test_finished_sweep_reruns_only_failed_trials(
    finished: SweepResult, config: SweepConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    again = sweep(config)
    assert (again.mlflow_run_id, again.best_value) == (finished.mlflow_run_id, finished.best_value)
    below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[UUID(again.flow_run_id)]))
    with get_client(sync_client=True) as client:
        names = sorted(run.name for run in client.read_flow_runs(flow_run_filter=below))
    assert names == [f"whole-00{point}-s{seed}" for point in (2, 4) for seed in (0, 1)]


def test_reused_name_with_another_space_is_rejected(finished: SweepResult, config: SweepConfig) -> None:
    with pytest.raises(ConfigError, match="was started with another mode, space: restore it"):
        sweep(config.model_copy(update={"space": {RATE: (1.0,)}, "mode": "max"}))
    with pytest.raises(ConfigError, match="is in use by a run"):
        sweep(config.model_copy(update={"run_name": "whole-001-s0"}))


def test_missing_metric_fails_every_trial(
    folder: Path, engine_url: str, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    config_fields = sweep_fields(
        folder, "blind", mlflow_uri, engine_url, metric="test/nil", prune=None, space={}, seeds=[0]
    )
    config_fields["base"] |= {"num_steps": 1, "eval_every": 0}
    with pytest.raises(ServiceError, match=r"no finite value of the metric 'test/nil'; its metrics are .*loss/base"):
        sweep(SweepConfig.model_validate(config_fields))
    assert "test/nil" in (folder / "runs" / "blind" / "report.html").read_text()


def test_killed_trial_process_is_restarted(folder: Path, mlflow_uri: str) -> None:
    """The first attempt hangs on a silent service and is killed; the second one finds no service."""
    process = TrialProcess("sft")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        config_fields = sft_fields(folder, "lost", mlflow_uri, f"http://127.0.0.1:{port}")
        killer = threading.Thread(target=lambda: (silent.accept(), process._process.kill()))
        killer.start()
        outcome = process.run(SftConfig.model_validate(config_fields), lambda *_: "")
        killer.join()
    assert (outcome.status, outcome.retryable) == ("failed", True)
    assert outcome.reason.startswith("The trial's process exited with status -9")
    outcome = process.run(SftConfig.model_validate(config_fields), lambda *_: "")
    assert outcome.status == "failed"
    assert f"127.0.0.1:{port}" in outcome.reason
    process.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_sweep_resumes(
    tmp_path: Path, prefect_server: str, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill -9 after the first finished trial, with other trials and the sweep's own engine running."""
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    config_fields = sweep_fields(tmp_path, "killed", mlflow_uri, "local", space={RATE: [1e-2, 1e-3]}, prune=None)
    config_fields["base"] |= {"num_steps": 8, "checkpoint_every": 1, "eval_every": 4}
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(config_fields))
    record = tmp_path / "runs" / "killed" / "trials.jsonl"
    command = [sys.executable, "-m", "flows.sweep", "--config", str(path)]
    environment = {**os.environ, "PREFECT_API_URL": prefect_server, "TINKER_FLOWS_HOME": str(tmp_path / "home")}
    under_way = tmp_path / "runs" / "killed-002-s0" / "checkpoints.jsonl"
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: record.exists() and '"completed"' in record.read_text() and under_way.exists(), process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = read_trials(LocalDirectory(record.parent))
    half_done = under_way.read_text().splitlines()
    assert 0 < len(before.finished) < 4

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Resumed killed: {len(before.finished)} of 4 trials are done." in done.stderr
    after = read_trials(LocalDirectory(record.parent))
    assert {trial.status for trial in after.finished.values()} == {"completed"}
    for key, trial in before.finished.items():
        assert after.finished[key] == trial  # neither repeated nor recorded again
    lines = record.read_text().splitlines()
    assert sum('"status"' in line for line in lines) == 4
    # The trial resumed from its checkpoint.
    assert under_way.read_text().splitlines()[: len(half_done)] == half_done
    below = MlflowClient(mlflow_uri).search_runs(
        [MlflowClient(mlflow_uri).get_experiment_by_name("tinker-flows").experiment_id],  # type: ignore[union-attr]
        "tags.`tinker_flows.sweep` = 'killed' and tags.`tinker_flows.point` = '2'",
    )
    assert len(below) == 2
    # No engine or trial process remains.
    assert str(tmp_path / "home") not in subprocess.run(["ps", "axeww"], capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trials_on_a_deployment(
    tmp_path: Path, prefect_server: str, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers share the sweep's engine, and pruning cancels a trial there."""
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    serve = "from flows.sft import sft; sft.serve(name='trials', print_starting_message=False)"
    environment = {**os.environ, "PREFECT_API_URL": prefect_server}
    serving = subprocess.Popen([sys.executable, "-c", serve], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        with get_client(sync_client=True) as client:
            wait_for(lambda: any(deployment.name == "trials" for deployment in client.read_deployments()), serving)
        config_fields = sweep_fields(
            tmp_path, "sent", mlflow_uri, "local", deployment="sft/trials", concurrency=1, seeds=[0]
        )
        config_fields["space"] = {RATE: [1e-2, 1e-7]}
        config_fields["base"] |= {"num_steps": 150}
        config_fields["prune"] = {"rule": "median", "min_trials": 1}
        result = sweep(SweepConfig.model_validate(config_fields))
    finally:
        serving.terminate()
        serving.wait(60)
    assert (result.num_completed, result.num_pruned, result.best_point) == (1, 1, 1)
    urls = {run.data.tags["tinker.base_url"] for run in runs_below(result).values()}
    assert len(urls) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cluster", ["dask", "ray"])
def test_trials_on_a_cluster(
    tmp_path: Path, cluster: str, mlflow_uri: str, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruning stops a trial on a worker, and a killed trial is retried from its checkpoint."""
    pytest.importorskip(
        {"dask": "distributed"}.get(cluster, cluster), reason=f"pip install -c constraints.txt -e '.[{cluster}]'"
    )
    for name in ("RAY_ADDRESS", "DASK_SCHEDULER_ADDRESS", "DASK_SCHEDULER__ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    config_fields = sweep_fields(
        tmp_path, f"sent-{cluster}", mlflow_uri, engine_url, cluster=cluster, concurrency=1, seeds=[0]
    )
    config_fields["space"] = {RATE: [1e-2, 1e-7]}
    config_fields["base"] |= {"num_steps": 60, "checkpoint_every": 4}
    config_fields["prune"] = {"rule": "median", "min_trials": 1}
    killer = threading.Thread(target=kill_one, args=("flows.sweeps.backends.worker",))
    killer.start()
    result = sweep(SweepConfig.model_validate(config_fields))
    killer.join()
    assert (result.num_completed, result.num_pruned, result.best_point) == (1, 1, 1)
    assert len(flow_runs_below(result)) == 3
    left = subprocess.run(["ps", "axww"], capture_output=True, text=True).stdout
    assert "flows.sweeps.backends.worker" not in left


def kill_one(command: str) -> None:
    """Kill the first process of a command after it has made progress."""
    while not (found := subprocess.run(["pgrep", "-f", command], capture_output=True, text=True).stdout.split()):
        time.sleep(0.1)
    time.sleep(15)
    os.kill(int(found[0]), signal.SIGKILL)


def wait_for(seen: Any, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and process.poll() is None:
        if seen():
            return
        time.sleep(0.1)
    raise AssertionError(f"it ended with {process.poll()}, or took too long")


@pytest.mark.slow
def test_layers_that_get_an_adapter_are_dimensions(
    folder: Path, engine: EngineProcess, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    base = sft_fields(folder, "base", mlflow_uri, engine.url) | {"num_steps": 1, "eval_every": 0, "objective": {}}
    space = {"train_attn": [True], "train_mlp": [True, False], "train_unembed": [True, False]}
    fields = {"run_name": "layers", "base": base, "space": space, "metric": "loss/total", "concurrency": 1}
    result = sweep(SweepConfig.model_validate(fields))
    trials = read_trials(LocalDirectory(Path(result.directory)))
    assert (result.num_completed, result.num_failed) == (4, 0)
    for point in trials.points:
        name = trials.finished[point.number, 0].run_name
        records = (folder / "runs" / name / "checkpoints.jsonl").read_text().splitlines()
        adapters = [
            key for key in saved_weights(engine.state, json.loads(records[-1])["state_path"]) if "adapter" in key
        ]
        layers = {"train_attn": "self_attn", "train_mlp": ".mlp.", "train_unembed": "lm_head"}
        trained = {field: any(layer in key for key in adapters) for field, layer in layers.items()}
        assert trained == dict(point.values)
