"""kill -9 at random moments: the resumed run ends with the weights of one that was never stopped, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from dpo_config import dpo_fields
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling
from rl_config import rl_fields
from saved_weights import saved_weights
from sft_config import sft_fields

NUM_STEPS = 24


def start(config: Path, run_name: str, home: Path, prefect_url: str, method: str = "sft") -> subprocess.Popen[bytes]:
    """The command a user types, with an engine of its own."""
    environment = {**os.environ, "TINKER_FLOWS_HOME": str(home), "PREFECT_API_URL": prefect_url}
    environment.pop("TINKER_API_KEY", None)
    return subprocess.Popen(
        [sys.executable, "-m", f"flows.{method}", "--config", str(config), f"run_name={run_name}"],
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
    return saved_weights(home / "engine", record["state_path"])


SCHEDULE = {"schedule": "linear", "start": 0.0, "end": 0.5}
OBJECTIVES: dict[str, dict[str, Any]] = {
    # Learned weights, so that what the objective remembers has to come back too.
    "two passes": {"regularizers": [{"name": "topology"}, {"name": "logic"}], "balance": {"method": "gradnorm"}},
    "one pass": {
        "regularizers": [{"name": "confidence", "weight": SCHEDULE}, {"name": "l2", "weight": 0.01, "every": 3}]
    },
    "dpo": {"base_loss": "dpo", "regularizers": [{"name": "kl", "weight": 0.01}]},
    "rl": {"base_loss": "importance_sampling", "regularizers": [{"name": "kl", "weight": 0.1}, {"name": "length"}]},
}
# What rl samples is to be the same to the bit, and shown, token by token.
EXACT = {"engine": {"threads": 1, "deterministic": True}, "transcripts_every": 1}
STREAM = {"schedule": {"mode": "stream", "num_minibatches": 2}}
METHODS: dict[str, tuple[str, Callable[[Path, str, str], dict[str, Any]]]] = {
    "two passes": ("sft", sft_fields),
    "one pass": ("sft", sft_fields),
    "dpo": ("dpo", dpo_fields),
    "rl": ("rl", lambda *given: rl_fields(*given) | EXACT),
    "rl stream": ("rl", lambda *given: rl_fields(*given) | EXACT | STREAM),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "num_kills"),
    [
        ("two passes", 1),
        pytest.param("two passes", 3, marks=pytest.mark.slow),
        pytest.param("one pass", 2, marks=pytest.mark.slow),
        pytest.param("dpo", 2, marks=pytest.mark.slow),
        pytest.param("rl", 3, marks=pytest.mark.slow),
        pytest.param("rl stream", 2, marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_equals_never_stopped(
    tmp_path: Path, prefect_server: str, mlflow_uri: str, kind: str, num_kills: int
) -> None:
    never, often = play(tmp_path, prefect_server, mlflow_uri, kind, num_kills)
    assert often.weights == never.weights
    assert len(never.weights) > 0
    assert often.curves == never.curves
    assert often.transcripts == never.transcripts
    assert len(never.transcripts) == (NUM_STEPS if kind.startswith("rl") else 0)


@dataclass(frozen=True, slots=True)
class Played:
    """What a run came to: its final weights, each metric by step that measures no time, and what was sampled."""

    weights: dict[str, bytes]
    curves: dict[str, list[tuple[int, float]]]
    transcripts: dict[str, str]


def play(tmp_path: Path, prefect_server: str, mlflow_uri: str, kind: str, num_kills: int) -> tuple[Played, Played]:
    """A run that was never stopped, and one that was killed so often and went on."""
    home = tmp_path / "home"
    config = tmp_path / "config.yaml"
    never, often = (f"{how}-{kind.replace(' ', '-')}-{num_kills}" for how in ("never-killed", "killed"))
    method, fields = METHODS[kind]
    changes = {"num_steps": NUM_STEPS, "eval_every": 4, "objective": OBJECTIVES[kind.removesuffix(" stream")]}
    config.write_text(yaml.safe_dump(fields(tmp_path, never, mlflow_uri) | changes))
    finish(start(config, never, home, prefect_server, method))
    whole = final_weights(tmp_path / "runs" / never, home)

    seed = random.SystemRandom().randrange(10**6)
    print(f"moments drawn with seed {seed}")
    moments = random.Random(seed)
    directory = tmp_path / "runs" / often
    for step in sorted(moments.sample(range(-1, NUM_STEPS - 6), num_kills)):
        process = start(config, often, home, prefect_server, method)
        wait_for_step(often, process, mlflow_uri, step)
        time.sleep(moments.uniform(0, 0.3))  # anywhere between one step's log and a later one's
        assert process.poll() is None, process.communicate()[0].decode()
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    output = finish(start(config, often, home, prefect_server, method))

    assert "Resumed" in output
    (undisturbed,) = find_run(never, mlflow_uri)
    (run,) = find_run(often, mlflow_uri)  # one, whenever it was killed
    assert run.data.params["learning_rate"] == undisturbed.data.params["learning_rate"]
    client = MlflowClient(mlflow_uri)

    def curves(of: Run) -> dict[str, list[tuple[int, float]]]:
        keys = [key for key in of.data.metrics if not key.startswith(("time/", "cost/")) and "duration_s" not in key]
        points = {key: client.get_metric_history(of.info.run_id, key) for key in keys}
        return {key: sorted((point.step, point.value) for point in each) for key, each in points.items()}

    def transcripts(name: str) -> dict[str, str]:
        return {path.name: path.read_text() for path in (tmp_path / "runs" / name).glob("transcripts-*.html")}

    return (
        Played(whole, curves(undisturbed), transcripts(never)),
        Played(final_weights(directory, home), curves(run), transcripts(often)),
    )


def flow_run_of(run_name: str) -> FlowRun:
    with get_client(sync_client=True) as client:
        return next(each for each in client.read_flow_runs() if each.name == run_name)


@pytest.mark.parametrize("how", ["Ctrl-C", pytest.param("the UI", marks=pytest.mark.slow)])
def test_a_stop_saves_the_step_under_way_and_leaves_nothing(
    tmp_path: Path, prefect_server: str, mlflow_uri: str, how: str
) -> None:
    home = tmp_path / "home"
    config = tmp_path / "sft.yaml"
    # No checkpoint is due, and without regularizers a step is sent while the one before it is computed.
    objective = {} if how == "Ctrl-C" else {"regularizers": [{"name": "confidence"}]}
    rare = {"num_steps": 999, "num_epochs": 99, "checkpoint_every": 500, "eval_every": 0, "objective": objective}
    run_name = f"stopped-{how[-2:]}"
    config.write_text(yaml.safe_dump(sft_fields(tmp_path, run_name, mlflow_uri) | rare))
    process = start(config, run_name, home, prefect_server)
    wait_for_step(run_name, process, mlflow_uri, 2)
    if how == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    else:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run_of(run_name).id, Cancelling())
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output.decode()
    assert "resumes from the last checkpoint" in output.decode()
    assert "Traceback" not in output.decode()
    (run,) = find_run(run_name, mlflow_uri)
    assert run.info.status == "KILLED"
    (record,) = (tmp_path / "runs" / run_name / "checkpoints.jsonl").read_text().splitlines()
    assert json.loads(record)["step"] == last_step(run_name, mlflow_uri) + 1
    if how == "the UI":
        state = flow_run_of(run_name).state
        assert state is not None
        assert state.is_cancelled()
    engines = subprocess.run(["pgrep", "-f", f"engine.*--state {home}"], capture_output=True, text=True, check=False)
    assert engines.stdout == ""
