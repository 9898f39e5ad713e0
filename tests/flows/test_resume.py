"""kill -9 at random moments: the resumed run ends with the weights of one that was never stopped, bit for bit."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient
from mlflow.entities import Run
from safetensors.torch import load_file
from sft_config import sft_fields

NUM_STEPS = 24


def start(config: Path, run_name: str, home: Path, prefect_url: str) -> subprocess.Popen[bytes]:
    """The command a user types, with an engine of its own."""
    environment = {**os.environ, "TINKER_FLOWS_HOME": str(home), "PREFECT_API_URL": prefect_url}
    environment.pop("TINKER_API_KEY", None)
    return subprocess.Popen(
        [sys.executable, "-m", "flows.sft", "--config", str(config), f"run_name={run_name}"],
        env=environment,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[bytes]) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output.decode()
    return output.decode()


def wait_for_step(run_name: str, process: subprocess.Popen[bytes], mlflow_uri: str, step: int) -> None:
    """Until the MLflow store has the metrics of a step (-1: the run), or the process has ended."""
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline and last_step(run_name, mlflow_uri) < step:
        time.sleep(0.02)


def find_run(run_name: str, mlflow_uri: str) -> list[Run]:
    client = MlflowClient(mlflow_uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    return list(client.search_runs(experiments, f"attributes.run_name = '{run_name}'"))


def last_step(run_name: str, mlflow_uri: str) -> int:
    """-2 before there is a run."""
    runs = find_run(run_name, mlflow_uri)
    points = [p for run in runs for p in MlflowClient(mlflow_uri).get_metric_history(run.info.run_id, "loss/total")]
    return max((point.step for point in points), default=-1 if runs else -2)


def final_weights(directory: Path, home: Path) -> dict[str, bytes]:
    """Every tensor of the final checkpoint, optimizer and all, as the engine keeps it."""
    record = json.loads((directory / "checkpoints.jsonl").read_text().splitlines()[-1])
    assert record["final"]
    session, name = re.fullmatch(r"tinker://([^:]+):.+/weights/(.+)", record["state_path"]).groups()
    files = sorted((home / "engine" / "runs").glob(f"{session}*/weights/{name}@*/*.safetensors"))
    assert len(files) == 2
    return {f"{file.name}:{key}": tensor.numpy().tobytes() for file in files for key, tensor in load_file(file).items()}


@pytest.mark.timeout(600)
def test_killed_and_resumed_equals_never_stopped(tmp_path: Path, prefect_server: str, mlflow_uri: str) -> None:
    home = tmp_path / "home"
    config = tmp_path / "sft.yaml"
    # Learned weights, so that what the objective remembers has to come back too.
    objective = {"regularizers": [{"name": "topology"}, {"name": "logic"}], "balance": {"method": "gradnorm"}}
    fields = sft_fields(tmp_path, "whole", mlflow_uri) | {"num_steps": NUM_STEPS, "objective": objective}
    config.write_text(yaml.safe_dump(fields))
    finish(start(config, "whole", home, prefect_server))
    whole = final_weights(tmp_path / "runs" / "whole", home)

    seed = random.SystemRandom().randrange(10**6)
    print(f"moments drawn with seed {seed}")
    moments = random.Random(seed)
    directory = tmp_path / "runs" / "killed"
    for step in sorted(moments.sample(range(-1, NUM_STEPS - 6), 2)):
        process = start(config, "killed", home, prefect_server)
        wait_for_step("killed", process, mlflow_uri, step)
        time.sleep(moments.uniform(0, 0.3))  # anywhere between one step's log and a later one's
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    output = finish(start(config, "killed", home, prefect_server))

    assert final_weights(directory, home) == whole
    assert len(whole) > 0
    client = MlflowClient(mlflow_uri)
    (run,) = find_run("killed", mlflow_uri)  # one, whenever it was killed
    run_id = run.info.run_id
    assert run.data.params["learning_rate"] == "0.01"
    for key in ("loss/total", "term/logic/value"):
        steps = sorted(point.step for point in client.get_metric_history(run_id, key))
        assert steps == list(range(NUM_STEPS)), key
    assert sorted(point.step for point in client.get_metric_history(run_id, "test/nll")) == list(
        range(0, NUM_STEPS + 1, 4)
    )
    assert "Resumed" in output


def test_ctrl_c_stops_everything_and_says_how_to_go_on(tmp_path: Path, prefect_server: str, mlflow_uri: str) -> None:
    home = tmp_path / "home"
    config = tmp_path / "sft.yaml"
    config.write_text(yaml.safe_dump(sft_fields(tmp_path, "stopped", mlflow_uri) | {"num_steps": 64, "num_epochs": 9}))
    process = start(config, "stopped", home, prefect_server)
    wait_for_step("stopped", process, mlflow_uri, 2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output.decode()
    assert "resumes from the last checkpoint" in output.decode()
    assert "Traceback" not in output.decode()
    (run,) = find_run("stopped", mlflow_uri)
    assert run.info.status == "KILLED"
    engines = subprocess.run(["pgrep", "-f", f"engine.*--state {home}"], capture_output=True, text=True, check=False)
    assert engines.stdout == ""
